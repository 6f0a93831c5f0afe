// Errors are values: a code, the rank to blame (when one is known) and a text that grows on the way up.
// Success is a null pointer and costs nothing. Thread: any; a Status is a value.
#pragma once

#include <memory>
#include <sstream>
#include <string>
#include <utility>

namespace hc {

// Keep in step with hc_code in horoclone.h (api.cc asserts it).
enum class Code : int {
  kOk = 0,
  kNotInitialized = 1,   // Python: NotInitialized (HorovodInternalError and ValueError)
  kInvalidArgument = 2,  // Python: ValueError
  kMismatch = 3,         // Python: Mismatch
  kPeerLost = 4,         // Python: PeerLost
  kTimeout = 5,          // Python: Timeout
  kAborted = 6,          // Python: Aborted
  kUnsupported = 7,      // Python: Unsupported
  kInternal = 8,         // Python: HorovodInternalError
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string text, int culprit = -1)
      : state_(std::make_shared<State>(State{code, culprit, std::move(text)})) {}

  static Status ok() { return {}; }
  bool is_ok() const { return state_ == nullptr; }
  explicit operator bool() const { return is_ok(); }
  Code code() const { return state_ ? state_->code : Code::kOk; }
  int culprit() const { return state_ ? state_->culprit : -1; }  // world rank, -1 when unknown
  const std::string& text() const {
    static const std::string none;
    return state_ ? state_->text : none;
  }

  // Puts what only the layer above knows in front of the text: "ring step 3 of 6: connection closed".
  Status with(const std::string& context) const {
    return is_ok() ? *this : Status(state_->code, context + ": " + state_->text, state_->culprit);
  }

 private:
  struct State {
    Code code;
    int culprit;
    std::string text;
  };
  std::shared_ptr<const State> state_;  // null = success
};

// Concatenates anything that streams.
template <class... Parts>
std::string text_of(const Parts&... parts) {
  std::ostringstream out;
  ((out << parts), ...);
  return out.str();
}

template <class... Parts>
Status error(Code code, const Parts&... parts) {
  return Status(code, text_of(parts...));
}

template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Status status) : status_(std::move(status)) {}
  bool is_ok() const { return status_.is_ok(); }
  const Status& status() const { return status_; }
  T& value() { return value_; }
  T take() { return std::move(value_); }

 private:
  Status status_;
  T value_{};
};

}  // namespace hc

// Returns the error of `expression` to the caller; with more arguments, puts their concatenation in front of it.
#define HC_TRY(expression, ...)                                                                     \
  do {                                                                                              \
    ::hc::Status hc_try_status = (expression);                                                      \
    if (!hc_try_status.is_ok()) return hc_try_status __VA_OPT__(.with(::hc::text_of(__VA_ARGS__))); \
  } while (0)
