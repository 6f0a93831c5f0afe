// How grave a message is. Apart from the logger because the table of settings needs no more of it.
#pragma once

#include <cstdint>

namespace hc {

enum class LogLevel : uint8_t { kTrace, kDebug, kInfo, kWarning, kError, kFatal };
constexpr const char* name_of(LogLevel level) {
  constexpr const char* names[] = {"trace", "debug", "info", "warning", "error", "fatal"};
  return names[static_cast<int>(level)];
}

}  // namespace hc
