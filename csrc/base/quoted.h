// Names that users choose, in texts: a control character in one may not move a terminal's cursor or end a line of a
// log.
#pragma once

#include <cstdio>
#include <string>
#include <string_view>

namespace hc {

// Control characters, those of UTF-8's C1 range included, as \x1b; all else as it is.
inline std::string printable(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = static_cast<unsigned char>(i + 1 < text.size() ? text[i + 1] : 0);
    const bool is_c1 = byte == 0xc2 && next >= 0x80 && next < 0xa0;
    if (byte >= 0x20 && byte != 0x7f && !is_c1) {
      out.push_back(text[i]);
      continue;
    }
    char escaped[8];
    std::snprintf(escaped, sizeof escaped, "\\x%02x", is_c1 ? next : byte);
    out += escaped;
    i += is_c1;
  }
  return out;
}

// Not named `quoted`: std::quoted takes a std::string as well, and where <iomanip> is included it is preferred.
inline std::string in_quotes(std::string_view name) { return "'" + printable(name) + "'"; }

// A control character becomes a space.
inline std::string json_string(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + "\"";
}

}  // namespace hc
