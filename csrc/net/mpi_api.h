// The MPI functions that the core uses, taken at run time from the library that mpi4py has loaded, so nothing is
// compiled against one MPI. Handles are pointers in Open MPI and in the standard's ABI, ints in MPICH and Intel MPI;
// both are passed as intptr_t, of which a callee that wants an int reads the lower half (System V x86-64, AArch64).
//
// Thread: any; MPI itself must have been initialised with MPI_THREAD_MULTIPLE. Owner: the mesh.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/library.h"
#include "base/status.h"
#include "net/message_library.h"
#include "net/mpi_link.h"

namespace hc {

// X(name, arguments); all return an error class or MPI_SUCCESS, which is 0.
// clang-format off
#define HC_MPI_SYMBOLS(X)                                                               \
  X(MPI_Isend, (const void*, int, intptr_t, int, int, intptr_t, MessageRequest*))           \
  X(MPI_Irecv, (void*, int, intptr_t, int, int, intptr_t, MessageRequest*))                 \
  X(MPI_Test, (MessageRequest*, int*, void*))                                               \
  X(MPI_Cancel, (MessageRequest*))                                                          \
  X(MPI_Error_string, (int, char*, int*))
// clang-format on

struct MpiFunctions {
#define HC_FIELD(name, arguments) int(*name) arguments = nullptr;
  HC_MPI_SYMBOLS(HC_FIELD)
#undef HC_FIELD
};

class MpiApi final : public MessageLibrary {
 public:
  // Unsupported when a symbol is missing.
  static Result<std::shared_ptr<MpiApi>> load(const MpiLink& link);
  MpiApi(const MpiFunctions& functions, MpiLink link) : mpi_(functions), link_(std::move(link)) {}

  const char* name() const override { return "MPI"; }
  Status send(const void* data, size_t bytes, int rank, int tag, MessageRequest* request) override;
  Status receive(void* data, size_t bytes, int rank, int tag, MessageRequest* request) override;
  Status test(MessageRequest* request, bool* done) override;
  bool cancel_receive(MessageRequest* request, double limit_s) override;
  // MPI takes no send back.
  bool cancel_send(MessageRequest* request, double) override;

 private:
  Status check(int result, const char* call) const;

  const MpiFunctions mpi_;
  const MpiLink link_;
};

}  // namespace hc
