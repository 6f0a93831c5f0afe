// hc_connect for Python: it waits without the GIL, and looks now and then for Ctrl-C and for news of the other
// ranks. Thread: the one that calls init.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "horoclone.h"

namespace hc_python {

using MpiHandles = std::tuple<std::string, uintptr_t, uintptr_t, bool>;  // the fields of hc_mpi

struct Members {
  int rank;
  const std::vector<std::string>& endpoints;
  const std::string& secret;
  const std::string& job;
  uint64_t generation;
  double timeout_s;
  const std::optional<MpiHandles>& mpi;
  const pybind11::object& look;  // None, or called every 50 ms: what it raises ends the attempt
};

// Throws what a signal handler or `look` raised; else the core's status, the caller's.
hc_status* connect_interruptibly(hc_runtime* rt, const Members& members);

}  // namespace hc_python
