// The stall report: which operations wait, for whom, how long, and what the late ranks are doing. Thread: the driving
// thread.
#include <algorithm>

#include "agreement/frames.h"
#include "engine/engine.h"

namespace hc {

namespace {

constexpr size_t kShown = 5;  // pending operations in a late rank's answer

// {3, 7, 8, 9} -> "rank 3", "ranks 3,7-9"
std::string ranks_text(std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size();) {
    size_t end = i;
    while (end + 1 < ranks.size() && ranks[end + 1] == ranks[end] + 1) ++end;
    text += text_of(i ? "," : "", ranks[i]);
    if (end > i) text += text_of(end == i + 1 ? "," : "-", ranks[end]);
    i = end + 1;
  }
  return text;
}

std::vector<int> world_ranks(const std::vector<int>& group_ranks, const ProcessSet& set) {
  std::vector<int> ranks;
  for (int g : group_ranks) ranks.push_back(set.ranks[g]);
  return ranks;
}

}  // namespace

// Only a coordinator knows who is missing. (A message's two ranks know it themselves.)
std::string Engine::coordinated_stalls(const ProcessSet& set, TimePoint now, StallFacts* facts) const {
  std::string report;
  if (!set.coordinator) return report;
  for (const Stall& stall : set.coordinator->stalled(now, config_.stall_check_s)) {
    const std::vector<int> missing = world_ranks(stall.missing, set);
    report += text_of("\n  ", stall.name, " (", static_cast<int>(stall.waited_s), " s): missing ", ranks_text(missing),
                      "; ready ", ranks_text(world_ranks(stall.present, set)));
    if (set.id) report += text_of("; process set ", set.id);
    if (!stall.hint.empty()) report += "; " + stall.hint;
    facts->late.insert(missing.begin(), missing.end());
    facts->longest_s = std::max(facts->longest_s, stall.waited_s);
  }
  return report;
}

// In a frozen plan no coordinator knows; the lowest of the ranks that wait speaks for them.
std::string Engine::frozen_stalls(const ProcessSet& set, TimePoint now, StallFacts* facts) const {
  std::string report;
  for (const ProcessSet::FrozenRun& run : set.frozen_runs) {
    const double waited_s = seconds_between(run.op->submitted, now);
    if (waited_s < config_.stall_check_s) continue;
    const std::vector<int> late = run.collective->late_members();
    int speaker = 0;
    while (std::find(late.begin(), late.end(), speaker) != late.end()) ++speaker;
    if (late.empty() || speaker != set.group_rank) continue;
    const std::vector<int> missing = world_ranks(late, set);
    report +=
        text_of("\n  ", run.op->describe(), " (", static_cast<int>(waited_s), " s): missing ", ranks_text(missing));
    facts->late.insert(missing.begin(), missing.end());
    facts->longest_s = std::max(facts->longest_s, waited_s);
  }
  return report;
}

void Engine::report_stalls(TimePoint now) {
  next_stall_report_ = now + std::chrono::milliseconds(500);
  std::string report;
  StallFacts facts;
  for (const auto& [id, set] : sets_)
    report += coordinated_stalls(*set, now, &facts) + frozen_stalls(*set, now, &facts);
  report += messages_.stalled(now, config_.stall_check_s, &facts.longest_s, &facts.late);
  if (report.empty()) return inquiry_.close();
  if (!inquiry_.is_open()) open_inquiry(facts.late, now);
  if (!inquiry_.complete(now)) {
    next_stall_report_ = next_timer_ = now + std::chrono::milliseconds(20);
    return;
  }
  report += inquiry_.text();
  inquiry_.close();
  next_stall_report_ = now + std::chrono::milliseconds(static_cast<int64_t>(config_.stall_check_s * 1000));
  const bool may_end = config_.stall_shutdown_s > config_.stall_check_s;
  if (may_end) {
    const double left_s = std::max(0.0, config_.stall_shutdown_s - facts.longest_s);
    next_stall_report_ =
        std::min(next_stall_report_,
                 now + std::chrono::milliseconds(std::max<int64_t>(50, static_cast<int64_t>(left_s * 1000))));
  }
  const std::string text =
      "One or more tensors were submitted to be reduced, gathered or broadcasted by a subset of ranks and are waiting "
      "for the remainder. Stalled ops:" +
      report;
  if (may_end && facts.longest_s >= config_.stall_shutdown_s)
    fail_everything(Status(Code::kAborted, text_of("stalled longer than HOROVOD_STALL_SHUTDOWN_TIME_SECONDS. ", text),
                           mesh_->rank()));
  else
    log_.warning(text);
}

// Asks the late ranks what they do, and everybody to save its record where that is wished for.
void Engine::open_inquiry(const std::set<int>& late, TimePoint now) {
  inquiry_.open(now);
  for (int r = 0; r < mesh_->size(); ++r) {
    const bool asked = late.contains(r) && config_.stall_stacks && inquiry_.asked() < Inquiry::kAsked && !left_[r];
    if (asked) inquiry_.ask(r);
    if (r == mesh_->rank()) {
      if (asked) inquiry_.answer(r, testimony());
    } else if ((asked || !config_.recorder_dir.empty()) && !left_[r]) {
      frame_.clear();
      frame_.put(FrameKind::kInquiry);
      frame_.put(static_cast<uint8_t>(asked));
      if (Status sent = send_frame(r, true); !sent.is_ok()) return fail_everything(sent);
    }
  }
  save_record("stall");
}

Status Engine::answer_inquiry(int from, bool asked) {
  save_record("stall");
  if (!asked) return Status::ok();
  frame_.clear();
  frame_.put(FrameKind::kTestimony);
  frame_.put_text(testimony());
  return send_frame(from, true);
}

// What this rank does instead of what the others wait for.
std::string Engine::testimony() {
  const TimePoint now = Clock::now();
  std::string text;
  size_t shown = 0, pending = 0;
  for (const auto& [id, set] : sets_) {
    pending += set->pending.size();
    for (const Operation* op : set->pending)
      if (shown++ < kShown)
        text += text_of(text.empty() ? "waits in " : ", ", op->describe(), " (",
                        static_cast<int>(seconds_between(op->submitted, now)), " s)");
  }
  pending += messages_.outstanding();
  for (const Operation* op : messages_.operations())
    if (shown++ < kShown)
      text += text_of(text.empty() ? "waits in " : ", ", op->describe(), " (",
                      static_cast<int>(seconds_between(op->submitted, now)), " s)");
  if (pending > kShown) text += text_of(" and ", pending - kShown, " more");
  if (text.empty()) {
    std::lock_guard lock(submit_mu_);
    text = "has nothing pending; its last call was " + recorder_.last_call();
  }
  return text + "\n" + stack_source_.take();
}

}  // namespace hc
