// Whether a sanitizer runs these tests: what it watches costs ten times as much, and it needs fewer repeats to see.
#pragma once

namespace hc {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

#if defined(__SANITIZE_THREAD__)
// What it looks for lies in the order of events: each way through the code once, and less data, since it watches each
// access.
inline constexpr bool kThreadSanitized = true;
#else
inline constexpr bool kThreadSanitized = false;
#endif

}  // namespace hc
