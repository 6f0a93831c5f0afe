// What settings_table.cc says of each setting, for config.cc, which reads and prints them, and for nobody else.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <variant>

#include "base/config.h"

namespace hc {

// What a value may look like. Numbers lie in [low, high]; a word is one of `words` ("a|b|c"), case does not
// matter.
struct SettingRule {
  enum class Kind : uint8_t { kFlag, kWord, kText, kBytes, kCount, kNumber };
  Kind kind = Kind::kText;
  double low = 0, high = 0;
  const char* words = "";
  const char* unit = "";
};

// A setting of the core: where it goes, what it is called, what it may be.
struct SettingRow {
  std::variant<bool Config::*, int Config::*, int64_t Config::*, size_t Config::*, double Config::*,
               std::string Config::*, LogLevel Config::*>
      field;
  const char* name;     // without HOROCLONE_
  const char* horovod;  // without HOROVOD_; "": it has none
  SettingRule rule;
  const char* help;
};

// One that the launcher or the Python package reads: listed so that all are documented in one place.
struct LauncherSettingRow {
  const char* name;
  const char* horovod;
  const char* type;
  const char* default_value;
  const char* help;
};

std::span<const SettingRow> setting_rows();
std::span<const LauncherSettingRow> launcher_setting_rows();

}  // namespace hc
