// The settings of one runtime: a plain value that hc_runtime_create reads once. It looks up HOROCLONE_<name> first,
// then HOROVOD_<name> where the meaning is the same; an empty value counts as unset. settings_table.h lists the
// fields, settings_table.cc what they are called and may be. Thread: any.
#pragma once

#include <functional>
#include <set>
#include <span>
#include <string>
#include <utility>

#include "base/settings_table.h"
#include "base/status.h"

namespace hc {

struct Config {
#define HC_FIELD(type, field, default_value) type field = default_value;
  HC_SETTINGS(HC_FIELD)
#undef HC_FIELD

  // The HOROCLONE_ names, without the prefix, of the settings that the environment or the caller has set.
  std::set<std::string, std::less<>> given;

  // Gives the value of a variable, or null when it is not set.
  using Lookup = std::function<const char*(const char* name)>;
  // InvalidArgument names the variable, its value and what is accepted.
  static Result<Config> read(const Lookup& lookup);
  // The last pair of a name wins; unknown names are ignored.
  static Result<Config> read(std::span<const std::pair<std::string, std::string>> settings);
};

// [{name, type, default, accepts, help, horovod, read_by}], in table order.
std::string settings_json();

}  // namespace hc
