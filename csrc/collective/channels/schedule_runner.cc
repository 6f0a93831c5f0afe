// The loop behind schedule_runner.h. One pass: complete what has moved (which is where reductions happen), post what
// may go, do a little local work, let the channels move, complete. A pass that changes nothing ends the step.
#include "collective/channels/schedule_runner.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace hc {
namespace {

constexpr int kPassesPerStep = 8;         // then other collectives get their turn
constexpr int kLocalSegmentsPerPass = 4;  // copying is cut up for the same reason

size_t elements_per_segment(const Task& task) {
  return std::max<size_t>(1, std::min(task.segment_bytes, kMaxTransferBytes) / size_of(task.dtype));
}
// Without the zeroing that make_unique would do; null when memory is short.
std::unique_ptr<std::byte[]> uninitialised(size_t bytes) {
  return std::unique_ptr<std::byte[]>(new (std::nothrow) std::byte[bytes]);
}

}  // namespace

bool ScheduleRunner::Flow::needs_channel() const {
  if (next < steps.size()) return true;
  return in_flight() && !transfers[place_of(posted - 1)].done;  // they complete in order
}

ScheduleRunner::ScheduleRunner(Task task, const Group& group, Schedule schedule)
    : task_(std::move(task)),
      schedule_(std::move(schedule)),
      view_(task_.pieces, size_of(task_.dtype)),
      item_(size_of(task_.dtype)),
      segment_elements_(elements_per_segment(task_)),
      unfinished_(schedule_.steps.size()) {
  algorithm_ = schedule_.name;
  const auto memory = [this](size_t bytes) {
    auto made = uninitialised(bytes);
    if (!made) status_ = error(Code::kInternal, "no memory to work in: ", bytes, " bytes");
    return made;
  };
  if (schedule_.scratch_count) scratch_ = memory(schedule_.scratch_count * item_);
  state_.resize(schedule_.steps.size());
  std::vector<int> flow_of(2 * static_cast<size_t>(group.size), -1);  // by peer, then receives and sends
  for (int i = 0; i < static_cast<int>(schedule_.steps.size()); ++i) {
    state_[i].segments = (schedule_.steps[i].count + segment_elements_ - 1) / segment_elements_;
    if (schedule_.steps[i].peer < 0) {
      local_.push_back(i);
    } else {
      add_to_flow(i, group, &flow_of);
    }
  }
  for (Flow& flow : flows_) {
    flow.transfers.resize(flow.sends ? flow.channel->sends_in_flight() : Channel::kInFlight);
    if (flow.staging_bytes) flow.staging = memory(flow.transfers.size() * flow.staging_bytes);
  }
  std::stable_sort(flows_.begin(), flows_.end(),
                   [](const Flow& a, const Flow& b) { return a.world_rank < b.world_rank; });
}

void ScheduleRunner::add_to_flow(int step, const Group& group, std::vector<int>* flow_of) {
  const Step& s = schedule_.steps[step];
  const bool sends = s.action == Action::kSend;
  int& index = (*flow_of)[2 * static_cast<size_t>(s.peer) + sends];
  if (index < 0) {
    index = static_cast<int>(flows_.size());
    flows_.emplace_back();
    flows_.back().channel = group.channel[s.peer];
    flows_.back().world_rank = group.world_rank[s.peer];
    flows_.back().sends = sends;
  }
  Flow& flow = flows_[index];
  flow.steps.push_back(step);
  if (s.action == Action::kReduce)
    flow.staging_bytes = std::max(flow.staging_bytes, std::min(s.count, segment_elements_) * item_);
}

ScheduleRunner::~ScheduleRunner() {
  for (Flow& flow : flows_)
    for (uint64_t n = flow.harvested; n < flow.posted; ++n)
      if (Transfer& t = flow.transfers[flow.place_of(n)]; !t.done) flow.channel->forget(&t);
}

Progress ScheduleRunner::start() {
  bool moved = false;
  return step(&moved);
}

Progress ScheduleRunner::step(bool* moved) {
  if (!status_.is_ok()) return Progress::kFailed;
  for (int pass = 0; pass < kPassesPerStep && unfinished_ > 0; ++pass) {
    bool any = false;
    // The channels may have moved outside of this: what has arrived makes room for receives before more is read.
    for (Flow& flow : flows_) any |= harvest(flow);
    for (Flow& flow : flows_) any |= post(flow);
    any |= work_locally();
    Status status = progress_channels(&any);
    if (!status.is_ok()) return fail(std::move(status));
    for (Flow& flow : flows_) any |= harvest(flow);
    if (!any) break;
    *moved = true;
  }
  return unfinished_ == 0 ? Progress::kDone : Progress::kPending;
}

ScheduleRunner::Segment ScheduleRunner::segment(int step, size_t index) const {
  const size_t first = index * segment_elements_;
  return {first, std::min(segment_elements_, schedule_.steps[step].count - first)};
}

// The rule in schedule.h.
bool ScheduleRunner::may_begin(int step, size_t index) const {
  const Step& s = schedule_.steps[step];
  for (int earlier = s.after_all.last; earlier >= std::max(s.after_all.first, complete_); --earlier)
    if (!is_complete(earlier)) return false;
  for (int earlier : s.after)
    if (earlier >= 0 && state_[earlier].done < std::min(index + 1, state_[earlier].segments)) return false;
  return s.action != Action::kGate ||
         s.from.first + segment(step, index).first + segment(step, index).count <= released_;
}

std::byte* ScheduleRunner::address(const Spot& spot, size_t element) const {
  const size_t offset = (spot.first + element) * item_;
  switch (spot.place) {
    case Place::kInput:
      return const_cast<std::byte*>(task_.pieces[0].in) + offset;  // only ever read
    case Place::kOutput:
      return task_.pieces[0].out + offset;
    case Place::kScratch:
      return scratch_.get() + offset;
  }
  return nullptr;
}

bool ScheduleRunner::post(Flow& flow) {
  bool any = false;
  while (flow.next < flow.steps.size() && flow.posted - flow.harvested < flow.transfers.size()) {
    const int index = flow.steps[flow.next];
    const Step& step = schedule_.steps[index];
    const bool stages = step.action == Action::kReduce;
    if (!stages && !may_begin(index, flow.next_segment)) break;
    const Segment part = segment(index, flow.next_segment);
    const size_t area = flow.place_of(flow.posted);
    Transfer& t = flow.transfers[area];
    t = Transfer{};
    t.tag = task_.tag;
    t.tag.offset += flow.posted++;
    t.bytes = part.count * item_;
    t.data =
        stages ? flow.staging.get() + area * flow.staging_bytes : address(flow.sends ? step.from : step.to, part.first);
    flow.sends ? flow.channel->post_send(&t) : flow.channel->post_receive(&t);
    if (++flow.next_segment == state_[index].segments) {
      ++flow.next;
      flow.next_segment = 0;
    }
    any = true;
  }
  return any;
}

Status ScheduleRunner::progress_channels(bool* any) {
  Channel* last = nullptr;
  for (Flow& flow : flows_) {
    if (!flow.in_flight() || flow.channel == last) continue;
    last = flow.channel;
    Status status = flow.channel->progress(any);
    if (status.is_ok()) continue;
    // A peer that has given and taken all of its share may leave; only what is still missing makes it an error.
    for (const Flow& f : flows_)
      if (f.channel == last && f.needs_channel()) return blame(f, status);
  }
  return Status::ok();
}

Status ScheduleRunner::blame(const Flow& flow, const Status& status) const {
  const Step& step = schedule_.steps[flow.steps[std::min(flow.oldest, flow.steps.size() - 1)]];
  const int culprit = status.culprit() >= 0 ? status.culprit() : flow.world_rank;
  return Status(status.code(),
                text_of(schedule_.name, " step ", step.round, " of ", schedule_.rounds, ": ",
                        flow.sends ? "sending to rank " : "receiving from rank ", flow.world_rank, ": ", status.text()),
                culprit);
}

bool ScheduleRunner::harvest(Flow& flow) {
  bool any = false;
  while (flow.in_flight()) {
    const size_t area = flow.place_of(flow.harvested);
    if (!flow.transfers[area].done) break;
    const int index = flow.steps[flow.oldest];
    const Step& step = schedule_.steps[index];
    if (step.action == Action::kReduce) {
      if (!may_begin(index, state_[index].done)) break;
      reduce_segment(step, segment(index, state_[index].done), flow.staging.get() + area * flow.staging_bytes);
    }
    complete_segment(index);
    if (is_complete(index)) ++flow.oldest;
    ++flow.harvested;
    any = true;
  }
  return any;
}

bool ScheduleRunner::work_locally() {
  bool any = false;
  for (int budget = kLocalSegmentsPerPass; budget > 0 && local_next_ < local_.size();) {
    const int index = local_[local_next_];
    const Step& step = schedule_.steps[index];
    if (!may_begin(index, state_[index].done)) break;
    if (step.action == Action::kCopy) {
      copy_segment(step, segment(index, state_[index].done));
      --budget;
    }
    complete_segment(index);
    if (is_complete(index)) ++local_next_;
    any = true;
  }
  return any;
}

void ScheduleRunner::complete_segment(int step) {
  if (++state_[step].done < state_[step].segments) return;
  --unfinished_;
  while (complete_ < static_cast<int>(state_.size()) && is_complete(complete_)) ++complete_;
}

void ScheduleRunner::reduce_segment(const Step& step, const Segment& part, std::byte* incoming) {
  const std::byte* mine = address(step.from, part.first);
  std::byte* const to = address(step.to, part.first);
  std::array<const std::byte*, 2> sources{incoming, mine};
  if (!step.incoming_first) std::swap(sources[0], sources[1]);
  // Floats are scaled in the pass that sums. Integers wrap in their own type like every hop before, then scale.
  const bool scales = step.finish && has_finish(), fuse = scales && is_float(task_.dtype);
  const Scale scale = fuse ? Scale{1.0, task_.scale.post, task_.scale.divisor} : Scale{};
  reduce(task_.dtype, task_.reduce, {&to, 1}, sources, part.count, scale);
  if (scales && !fuse) finish(task_.dtype, to, part.count, task_.scale);
}

void ScheduleRunner::copy_segment(const Step& step, const Segment& part) {
  const bool gathers = step.from.place == Place::kInput, scatters = step.to.place == Place::kOutput;
  if (task_.pieces.size() == 1 || (!gathers && !scatters))
    return copy_run(step, address(step.from, part.first), address(step.to, part.first), part.count);
  // Pieces: the input's and the output's parts lie alike, so at most one side is walked in scratch.
  size_t element = part.first;
  view_.each((gathers ? step.from : step.to).first + part.first, part.count, [&](const Piece& run) {
    const std::byte* from = gathers ? run.in : address(step.from, element);
    std::byte* to = scatters ? run.out : address(step.to, element);
    copy_run(step, from, to, run.count);
    element += run.count;
  });
}

void ScheduleRunner::copy_run(const Step& step, const std::byte* from, std::byte* to, size_t count) {
  if (step.prescale && task_.scale.pre != 1.0) {
    scale_copy(task_.dtype, to, from, count, task_.scale.pre);
  } else if (to != from) {
    std::memcpy(to, from, count * item_);
  }
  if (step.finish && has_finish()) finish(task_.dtype, to, count, task_.scale);
}

}  // namespace hc
