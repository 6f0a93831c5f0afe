// The reductions, in one list that everything reads: the host's loops, the kernels for GPUs, the checks, the names.
// Also compiled by nvcc and NVRTC, therefore it includes nothing. CONTRIBUTING.md tells how to add one.
#pragma once

namespace hc {

// The element that changes nothing. For bool, kOne, kAllOnes and kHighest are true and the others false.
enum class Identity : unsigned char { kZero, kOne, kAllOnes, kHighest, kLowest };

// The kinds of elements, as bits of the masks in the list, none of which has kMoved.
enum class Kind : unsigned char { kBool = 1, kInteger = 2, kFloat = 4, kMoved = 8 };
constexpr unsigned kOfBool = 1, kOfIntegers = 2, kOfFloats = 4;
constexpr unsigned kOfNumbers = kOfIntegers | kOfFloats, kOfAll = kOfBool | kOfNumbers, kOfBits = kOfBool | kOfIntegers;

// X(name, identity, kinds of elements). The first six are Horovod's, in its order: users see the positions as integers.
// clang-format off
#define HC_REDUCTIONS(X)          \
  X(Average, kZero, kOfNumbers)   \
  X(Sum, kZero, kOfAll)           \
  X(Adasum, kZero, kOfFloats)     \
  X(Min, kHighest, kOfAll)        \
  X(Max, kLowest, kOfAll)         \
  X(Product, kOne, kOfAll)        \
  X(And, kAllOnes, kOfBits)       \
  X(Or, kZero, kOfBits)           \
  X(Xor, kZero, kOfBits)
// clang-format on

#define HC_NAME(name, identity, kinds) k##name,
enum class Reduce : unsigned char { HC_REDUCTIONS(HC_NAME) };
#undef HC_NAME

#define HC_ONE(name, identity, kinds) +1
constexpr int kReduceCount = 0 HC_REDUCTIONS(HC_ONE);
#undef HC_ONE

constexpr const char* name_of(Reduce r) {
#define HC_CASE(name, identity, kinds) \
  case Reduce::k##name:                \
    return #name;
  switch (r) { HC_REDUCTIONS(HC_CASE) }
#undef HC_CASE
  return "?";
}

constexpr Identity identity_of(Reduce r) {
#define HC_CASE(name, identity, kinds) \
  case Reduce::k##name:                \
    return Identity::identity;
  switch (r) { HC_REDUCTIONS(HC_CASE) }
#undef HC_CASE
  return Identity::kZero;
}

constexpr bool takes(Reduce r, Kind kind) {
#define HC_CASE(name, identity, kinds) \
  case Reduce::k##name:                \
    return ((kinds) & static_cast<unsigned>(kind)) != 0;
  switch (r) { HC_REDUCTIONS(HC_CASE) }
#undef HC_CASE
  return false;
}

// Whether 0 times any finite factor is still the element that changes nothing.
constexpr bool has_zero_identity(Reduce r) { return identity_of(r) == Identity::kZero; }

// How elements are combined: an average is a sum that is divided afterwards.
constexpr Reduce reduced_as(Reduce r) { return r == Reduce::kAverage ? Reduce::kSum : r; }
// False for Adasum, whose coefficients belong to whole tensors.
constexpr bool is_element_wise(Reduce r) { return r != Reduce::kAdasum; }
// Whether there are loops for this reduction over elements of this kind.
constexpr bool is_element_reduction(Reduce r, Kind kind) {
  return takes(r, kind) && is_element_wise(r) && reduced_as(r) == r;
}

// Ends a loop's `if constexpr` chain over reductions: static_assert(kKnown<R>) fails for a reduction that the loop does
// not handle yet.
template <Reduce>
constexpr bool kKnown = false;

}  // namespace hc
