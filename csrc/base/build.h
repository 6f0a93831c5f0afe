// Identifies the build of the core: "0.1.0+4f2a9c01d3e7" is the package's version and a digest over the sources of
// everything on which ranks must agree: the layout of shared memory, the frames, the order of agreement. Equal texts
// mean that two ranks understand each other. csrc/build_digest.cmake makes it whenever one of those sources changes.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace hc {

inline constexpr size_t kBuildBytes = 28;  // of the text in a handshake, with zeros behind it

std::string_view build_name();

// The error text for a peer of another build. The peer chose `name`, so only a plain one is repeated.
std::string other_build(std::string_view name);

}  // namespace hc
