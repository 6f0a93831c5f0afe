// Which build of the core this is: "0.1.0+4f2a9c01d3e7", the package's version and a digest over the sources of
// everything that ranks must do alike: the layout of shared memory, the frames, the order of agreement. Equal texts
// mean that two ranks understand each other. Made by csrc/build_digest.cmake whenever one of those sources changes.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace hc {

inline constexpr size_t kBuildBytes = 28;  // of the text in a handshake, with zeros behind it

std::string_view build_name();

// Why nothing more is read from somebody whose build is another; fit for a log, whatever it says of itself.
std::string other_build(std::string_view name);

}  // namespace hc
