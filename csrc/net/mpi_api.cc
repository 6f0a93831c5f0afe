#include "net/mpi_api.h"

#include <sched.h>

#include "base/clock.h"

namespace hc {

namespace {
// MPI_Status has 20 bytes in MPICH, 24 in Open MPI, 32 in the standard's ABI. Nothing in it is read.
struct alignas(16) AnyStatus {
  std::byte bytes[128];
};
}  // namespace

Result<std::shared_ptr<MpiApi>> MpiApi::load(const MpiLink& link) {
  auto library = Library::loaded(link.library);  // stays loaded: whoever brought it uses it
  if (!library) return error(Code::kUnsupported, link.library, " is not loaded in this process");
  MpiFunctions found;
#define HC_RESOLVE(name, arguments)                                        \
  found.name = reinterpret_cast<int(*) arguments>(library->symbol(#name)); \
  if (!found.name) return error(Code::kUnsupported, link.library, " has no ", #name);
  HC_MPI_SYMBOLS(HC_RESOLVE)
#undef HC_RESOLVE
  return std::make_shared<MpiApi>(found, link);
}

Status MpiApi::check(int result, const char* call) const {
  if (result == 0) return Status::ok();
  char text[1024] = "";  // MPI_MAX_ERROR_STRING is 512 or less
  int length = 0;
  (void)mpi_.MPI_Error_string(result, text, &length);
  return error(Code::kInternal, call, ": ", *text ? text : "an error without a text");
}

Status MpiApi::send(const void* data, size_t bytes, int rank, int tag, MessageRequest* request) {
  return check(mpi_.MPI_Isend(data, static_cast<int>(bytes), link_.byte_type, rank, tag, link_.communicator, request),
               "MPI_Isend");
}

Status MpiApi::receive(void* data, size_t bytes, int rank, int tag, MessageRequest* request) {
  return check(mpi_.MPI_Irecv(data, static_cast<int>(bytes), link_.byte_type, rank, tag, link_.communicator, request),
               "MPI_Irecv");
}

Status MpiApi::test(MessageRequest* request, bool* done) {
  AnyStatus status;
  int flag = 0;
  HC_TRY(check(mpi_.MPI_Test(request, &flag, &status), "MPI_Test"));
  *done = flag != 0;
  return Status::ok();
}

bool MpiApi::cancel_receive(MessageRequest* request, double limit_s) {
  (void)mpi_.MPI_Cancel(request);
  const Deadline deadline = Deadline::in(limit_s);
  for (bool done = false;;) {
    if (!test(request, &done).is_ok() || done) return done;
    if (deadline.passed()) return false;
    ::sched_yield();
  }
}

bool MpiApi::cancel_send(MessageRequest* request, double) {
  bool done = *request == MessageRequest{};
  if (!done) (void)test(request, &done);
  return done;
}

}  // namespace hc
