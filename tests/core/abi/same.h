// Whether a function that we have declared is called as NVIDIA's header says: arguments of the same number and classes,
// pointers to things of one size.
#pragma once

#include <cstdio>
#include <cstring>
#include <type_traits>

namespace abi {

template <class T>
concept Sized = requires { sizeof(T); };

template <class Theirs, class Ours>
constexpr bool same_pointee() {
  using A = std::remove_cv_t<Theirs>;
  using B = std::remove_cv_t<Ours>;
  if constexpr (std::is_void_v<A> || std::is_void_v<B> || std::is_function_v<A> || std::is_function_v<B>)
    return true;
  else if constexpr (std::is_pointer_v<A> && std::is_pointer_v<B>)
    return same_pointee<std::remove_pointer_t<A>, std::remove_pointer_t<B>>();
  else if constexpr (std::is_class_v<A> && std::is_class_v<B>)
    return true;  // structures are compared by themselves
  else if constexpr (Sized<A> && Sized<B>)
    return sizeof(A) == sizeof(B);
  else
    return true;
}

template <class Theirs, class Ours>
constexpr bool same_argument() {
  constexpr bool numbers = (std::is_integral_v<Theirs> || std::is_enum_v<Theirs>) &&
                           (std::is_integral_v<Ours> || std::is_enum_v<Ours>);
  if constexpr (std::is_pointer_v<Theirs> && std::is_pointer_v<Ours>)
    return same_pointee<std::remove_pointer_t<Theirs>, std::remove_pointer_t<Ours>>();
  else if constexpr (std::is_pointer_v<Theirs> || std::is_pointer_v<Ours>)
    return false;
  else if constexpr (numbers)
    return sizeof(Theirs) == sizeof(Ours);
  else
    return sizeof(Theirs) == sizeof(Ours) && alignof(Theirs) == alignof(Ours) &&
           std::is_class_v<Theirs> == std::is_class_v<Ours>;
}

template <class Theirs, class Ours>
struct SameCall {
  static constexpr bool value = false;
};
template <class R, class... A, class S, class... B>
  requires(sizeof...(A) == sizeof...(B))
struct SameCall<R (*)(A...), S (*)(B...)> {
  static constexpr bool value = same_argument<R, S>() && (same_argument<A, B>() && ...);
};

inline int wrong = 0;
inline int compared = 0;
inline void expect(bool same, const char* what) {
  ++compared;
  if (same) return;
  ++wrong;
  std::printf("DIFFERS %s\n", what);
}
inline int report(const char* library, long long version) {
  std::printf("%s %lld: %d compared, %d differ\n", library, version, compared, wrong);
  return wrong != 0;
}

}  // namespace abi

#define ABI_TEXT_OF(x) #x
#define ABI_TEXT(x) ABI_TEXT_OF(x)
#define ABI_VALUE(theirs, ours) \
  abi::expect(static_cast<long long>(theirs) == static_cast<long long>(ours), #theirs " is not " #ours)
