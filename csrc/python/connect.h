// hc_connect for Python: without Python's lock, but with an ear for Ctrl-C. Thread: the one that calls init.
#pragma once

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
  uint32_t generation;
  double timeout_s;
  const std::optional<MpiHandles>& mpi;
};

// Throws what a signal handler raised; else the core's status, the caller's.
hc_status* connect_interruptibly(hc_runtime* rt, const Members& members);

}  // namespace hc_python
