#include "base/config.h"

#include <cctype>
#include <charconv>
#include <cmath>
#include <cstring>
#include <map>
#include <string_view>

#include "base/quoted.h"
#include "base/setting_rows.h"

namespace hc {
namespace {

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front()))) text.remove_prefix(1);
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) text.remove_suffix(1);
  return text;
}

// Position of `value` in "a|b|c", -1 when it is not there.
int position_of(const std::string& value, const char* words) {
  int position = 0;
  for (std::string_view rest = words;; ++position) {
    size_t bar = rest.find('|');
    if (rest.substr(0, bar) == value) return position;
    if (bar == std::string_view::npos) return -1;
    rest.remove_prefix(bar + 1);
  }
}

// Plain decimal text without an exponent for the whole numbers of the table.
std::string number_text(double value) {
  if (value == std::floor(value) && std::fabs(value) < 1e15) return std::to_string(static_cast<int64_t>(value));
  return text_of(value);
}

std::string accepts_text(const SettingRule& rule) {
  using Kind = SettingRule::Kind;
  std::string range = text_of(" from ", number_text(rule.low), " to ", number_text(rule.high));
  switch (rule.kind) {
    case Kind::kFlag:
      return "0 or 1 (also false, true, no, yes, off, on)";
    case Kind::kWord:
      return text_of("one of ", rule.words);
    case Kind::kText:
      return "any text";
    case Kind::kBytes:
      return text_of("whole bytes", range, ", or with a suffix KiB, MiB, GiB");
    case Kind::kCount:
      return text_of("a whole number", range);
    case Kind::kNumber:
      return text_of("a number", range, *rule.unit ? text_of(" (", rule.unit, ")") : "");
  }
  return {};
}

bool parse_flag(const std::string& text, double* out) {
  int position = position_of(text, "0|false|no|off|1|true|yes|on");
  if (position >= 0) *out = position >= 4;
  return position >= 0;
}

// The whole text must be a finite number, and a whole one unless `fraction`.
bool parse_number(std::string_view text, bool fraction, double* out) {
  if (!text.empty() && text.front() == '+') text.remove_prefix(1);
  auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), *out);
  bool complete = problem == std::errc() && end == text.data() + text.size() && std::isfinite(*out);
  return complete && (fraction || *out == std::floor(*out));
}

bool parse_bytes(std::string_view text, double* out) {
  constexpr std::pair<std::string_view, double> suffixes[] = {
      {"kib", 1024.0}, {"mib", 1048576.0}, {"gib", 1073741824.0}};
  double unit = 1;
  for (auto [suffix, bytes] : suffixes) {
    if (!text.ends_with(suffix)) continue;
    unit = bytes;
    text = trimmed(text.substr(0, text.size() - suffix.size()));
  }
  if (!parse_number(text, /*fraction=*/unit != 1, out)) return false;
  *out *= unit;
  return *out == std::floor(*out);
}

// Numbers of every kind go through a double: exact for all that the table's limits allow.
template <class T>
bool parse(const std::string& value, const SettingRule& rule, T* out) {
  using Kind = SettingRule::Kind;
  std::string text = lower(trimmed(value));
  if constexpr (std::is_same_v<T, std::string>) {
    if (rule.kind == Kind::kWord && position_of(text, rule.words) < 0) return false;
    *out = rule.kind == Kind::kWord ? text : std::string(trimmed(value));
    return true;
  } else if constexpr (std::is_enum_v<T>) {
    int position = position_of(text, rule.words);
    if (position >= 0) *out = static_cast<T>(position);
    return position >= 0;
  } else {
    double number = 0;
    bool good = rule.kind == Kind::kFlag    ? parse_flag(text, &number)
                : rule.kind == Kind::kBytes ? parse_bytes(text, &number)
                                            : parse_number(text, rule.kind == Kind::kNumber, &number);
    if (!good || number < rule.low || number > rule.high) return false;
    *out = static_cast<T>(number);
    return true;
  }
}

const char* found(const Config::Lookup& lookup, const std::string& name) {
  const char* value = lookup(name.c_str());
  return value && *value ? value : nullptr;
}

Status read_one(const Config::Lookup& lookup, const SettingRow& row, Config* config) {
  std::string name = text_of("HOROCLONE_", row.name);
  const char* value = found(lookup, name);
  if (!value && *row.horovod) {
    name = text_of("HOROVOD_", row.horovod);
    value = found(lookup, name);
  }
  if (!value) return {};
  config->given.insert(row.name);
  if (std::visit([&](auto field) { return parse(value, row.rule, &(config->*field)); }, row.field)) return {};
  return error(Code::kInvalidArgument, name, "='", value, "' is not valid: accepted is ", accepts_text(row.rule), ".");
}

// Settings that are each fine and together are not.
Status check_together(const Config& c) {
  if (c.liveness_warn_s > c.liveness_error_s)
    return error(Code::kInvalidArgument, "HOROCLONE_LIVENESS_WARN_S=", c.liveness_warn_s,
                 " is above HOROCLONE_LIVENESS_ERROR_S=", c.liveness_error_s, ": the warning must come first.");
  return {};
}

template <class T>
std::string default_text(const T& value) {
  if constexpr (std::is_same_v<T, std::string>)
    return value;
  else if constexpr (std::is_enum_v<T>)
    return name_of(value);
  else
    return number_text(static_cast<double>(value));
}

const char* type_name(const SettingRule& rule) {
  using Kind = SettingRule::Kind;
  switch (rule.kind) {
    case Kind::kFlag:
      return "flag";
    case Kind::kWord:
      return "word";
    case Kind::kText:
      return "text";
    case Kind::kBytes:
      return "bytes";
    case Kind::kCount:
      return "count";
    case Kind::kNumber:
      return std::strcmp(rule.unit, "") == 0     ? "number"
             : std::strcmp(rule.unit, "s") == 0  ? "seconds"
             : std::strcmp(rule.unit, "ms") == 0 ? "milliseconds"
                                                 : "microseconds";
  }
  return "";
}

struct Row {
  std::string name, type, default_value, accepts, help, horovod, read_by;
};

std::string json_of(const Row& row) {
  std::string horovod = row.horovod.empty() ? "null" : json_string("HOROVOD_" + row.horovod);
  return text_of("{\"name\": ", json_string("HOROCLONE_" + row.name), ", \"type\": ", json_string(row.type),
                 ", \"default\": ", json_string(row.default_value), ", \"accepts\": ", json_string(row.accepts),
                 ", \"help\": ", json_string(row.help), ", \"horovod\": ", horovod,
                 ", \"read_by\": ", json_string(row.read_by), "}");
}

}  // namespace

Result<Config> Config::read(const Lookup& lookup) {
  Config config;
  for (const SettingRow& row : setting_rows()) HC_TRY(read_one(lookup, row, &config));
  // HOROVOD_GLOO_TIMEOUT_SECONDS alone may be short: the default of the warning keeps its distance.
  if (!found(lookup, "HOROCLONE_LIVENESS_WARN_S"))
    config.liveness_warn_s = std::min(config.liveness_warn_s, config.liveness_error_s / 2);
  HC_TRY(check_together(config));
  return config;
}

Result<Config> Config::read(std::span<const std::pair<std::string, std::string>> settings) {
  std::map<std::string_view, const char*> values;
  for (const auto& [name, value] : settings) values[name] = value.c_str();
  return read([&](const char* name) {
    auto at = values.find(name);
    return at == values.end() ? nullptr : at->second;
  });
}

std::string settings_json() {
  const Config defaults;
  std::string out = "[";
  auto add = [&](const Row& row) {
    if (out.size() > 1) out += ",\n ";
    out += json_of(row);
  };
  for (const SettingRow& row : setting_rows()) {
    const std::string value = std::visit([&](auto field) { return default_text(defaults.*field); }, row.field);
    add({row.name, type_name(row.rule), value, accepts_text(row.rule), row.help, row.horovod, "core"});
  }
  for (const LauncherSettingRow& row : launcher_setting_rows())
    add({row.name, row.type, row.default_value, "", row.help, row.horovod, "launcher"});
  return out + "]";
}

}  // namespace hc
