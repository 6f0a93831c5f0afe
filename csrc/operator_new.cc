// What this library keeps for long (the record of a name, the agreement on it) must not lie in the gaps that an aligned
// allocation leaves beside it. Frameworks align their tensors: glibc before 2.38 takes 96 bytes more than the tensor,
// gives back what is left over, and finds the place of a freed tensor large enough for an equal one only while nothing
// lies in these gaps. One small record per new name would cost the size of a result. Hidden in libhoroclone.so, and in
// no other program: it replaces operator new for nobody else, and what it returns is the standard library's to delete.
#include <algorithm>
#include <new>

namespace {
constexpr std::size_t kLeastBytes = 112;  // with malloc's own 16: more than such a gap
}

void* operator new(std::size_t bytes) {
  if (void* memory = ::operator new(std::max(bytes, kLeastBytes), std::nothrow)) return memory;
  throw std::bad_alloc();
}
