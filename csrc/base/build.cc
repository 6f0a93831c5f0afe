#include "base/build.h"

#include <algorithm>
#include <cstring>

#include "base/status.h"

extern "C" const char hc_build_name[];

namespace hc {

std::string_view build_name() { return {hc_build_name, std::min(std::strlen(hc_build_name), kBuildBytes)}; }

std::string other_build(std::string_view name) {
  name = name.substr(0, std::min(name.find('\0'), kBuildBytes));
  const auto is_plain = [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || c == '.' || c == '+' || c == '-';
  };
  const bool plain = !name.empty() && std::all_of(name.begin(), name.end(), is_plain);
  return text_of("the other side is horoclone ", plain ? name : "of an unknown version", ", this one is horoclone ",
                 build_name(), "; install the same horoclone on every host");
}

}  // namespace hc
