#include "engine/watch/stall_watch.h"

#include <algorithm>

namespace hc {

namespace {
constexpr size_t kShown = 5;  // pending operations in a late rank's answer
constexpr auto kLookMs = std::chrono::milliseconds(500);

}  // namespace

Status StallWatch::report(TimePoint now, Stalls stalls, const OwnWork& mine) {
  const Config& config = context_.config;
  next_report_ = now + kLookMs;
  if (stalls.lines.empty()) {
    stack_request_.close();
    return Status::ok();
  }
  if (!stack_request_.is_open()) HC_TRY(ask(stalls.late, now, mine));
  if (!stack_request_.complete(now)) {
    next_report_ = now + kAnswerMs;
    return Status::ok();
  }
  stalls.lines += stack_request_.text();
  stack_request_.close();
  const auto in_s = [&](double s) { return now + std::chrono::milliseconds(static_cast<int64_t>(s * 1000)); };
  next_report_ = in_s(config.stall_check_s);
  const bool may_end = config.stall_shutdown_s > config.stall_check_s;
  if (may_end) next_report_ = std::min(next_report_, in_s(std::max(0.05, config.stall_shutdown_s - stalls.longest_s)));
  const std::string text =
      "One or more tensors were submitted to be reduced, gathered or broadcasted by a subset of ranks and are waiting "
      "for the remainder. Stalled ops:" +
      stalls.lines;
  if (may_end && stalls.longest_s >= config.stall_shutdown_s)
    return Status(Code::kAborted, text_of("stalled longer than HOROVOD_STALL_SHUTDOWN_TIME_SECONDS. ", text),
                  context_.rank());
  context_.log.warning(text);
  return Status::ok();
}

// Asks the late ranks what they do, and everybody to save its record where that is wished for.
Status StallWatch::ask(const std::set<int>& late, TimePoint now, const OwnWork& mine) {
  stack_request_.open(now);
  for (int r = 0; r < context_.mesh->size(); ++r) {
    if (link_.has_left(r)) continue;
    const bool asked =
        late.contains(r) && context_.config.stall_stacks && stack_request_.asked() < StackRequest::kAsked;
    if (asked) stack_request_.ask(r);
    if (r == context_.rank()) {
      if (asked) stack_request_.answer(r, what_this_rank_does(mine));
    } else if (asked || late.contains(r) || records_.are_wanted()) {
      link_.begin(FrameKind::kStackRequest).put(static_cast<uint8_t>(asked));
      HC_TRY(link_.send(r, true));
    }
  }
  records_.save("stall");
  return Status::ok();
}

Status StallWatch::answer(int from, bool asked, const OwnWork& mine) {
  asked_at_ = Clock::now();
  records_.save("stall");
  if (!asked) return Status::ok();
  link_.begin(FrameKind::kStackReply).put_text(what_this_rank_does(mine));
  return link_.send(from, true);
}

// Instead of what the others wait for.
std::string StallWatch::what_this_rank_does(const OwnWork& mine) {
  const TimePoint now = Clock::now();
  std::string text;
  const std::vector<const Operation*>& pending = mine.pending;
  for (size_t i = 0; i < std::min(kShown, pending.size()); ++i)
    text += text_of(text.empty() ? "waits in " : ", ", pending[i]->describe(), " (",
                    static_cast<int>(seconds_between(pending[i]->submitted, now)), " s)");
  if (pending.size() > kShown) text += text_of(" and ", pending.size() - kShown, " more");
  if (!mine.launched.empty()) text += (text.empty() ? "on its GPU: " : "; on its GPU: ") + mine.launched;
  if (text.empty()) text = "has nothing pending; its last call was " + intake_.last_call();
  return text + "\n" + stack_source_.take();
}

}  // namespace hc
