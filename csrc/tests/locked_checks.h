// Checks for tests whose ranks are threads: doctest's macros are not safe from several threads at once.
#pragma once

#include <doctest/doctest.h>

#include <mutex>

#include "base/status.h"

namespace hc {

inline std::mutex check_mu;
#define CHECK_LOCKED(...)           \
  do {                              \
    std::lock_guard lock(check_mu); \
    CHECK(__VA_ARGS__);             \
  } while (0)
#define CHECK_OK(expression)             \
  do {                                   \
    const Status checked = (expression); \
    std::lock_guard lock(check_mu);      \
    INFO(checked.text());                \
    CHECK(checked.is_ok());              \
  } while (0)

}  // namespace hc
