// What the kernel says about another process of this host. Thread: any.
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace hc {

// kStopped: by a signal (SIGSTOP), not by a debugger. kEnds: no thread of it runs its program any more. Its connections
// close, and its pidfd tells, only after its core has been written and its memory returned: seconds for some GB.
enum class ProcessState : uint8_t { kUnknown, kRuns, kStopped, kEnds };

// kUnknown: pid is 0, or nothing can be seen of it.
ProcessState state_of_process(pid_t pid);

}  // namespace hc
