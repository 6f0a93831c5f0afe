// What a mesh needs to know of MPI before it loads it.
#pragma once

#include <cstdint>
#include <string>

namespace hc {

// How the ranks reach each other through MPI. mpi4py makes it; only the handles differ between ranks.
struct MpiLink {
  std::string library;        // a loaded library whose symbols are MPI's, or that depends on it
  intptr_t communicator = 0;  // of exactly this world's ranks in this order, errors returned, used by nobody else
  intptr_t byte_type = 0;     // MPI_BYTE
  bool forced = false;        // asked for, or known to be faster; else whichever is
};

}  // namespace hc
