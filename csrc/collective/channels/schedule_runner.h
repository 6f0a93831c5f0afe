// Executes any schedule over a group's channels: posts segments, reduces what has arrived, forwards what is reduced.
// A segment is what one transfer carries; several of them are posted per peer and direction, so that reducing
// one hides receiving the next. Thread: the one that makes progress. Owner: whoever runs the collective.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "collective/channels/schedule.h"
#include "collective/collective.h"
#include "collective/pieces.h"

namespace hc {

class ScheduleRunner final : public Collective {
 public:
  // `group` is not needed after this returns, but its channels must outlive the runner, and so must the pieces' memory.
  // Task fields used: dtype, reduce, scale, pieces, segment_bytes, tag.
  ScheduleRunner(Task task, const Group& group, Schedule schedule);
  ~ScheduleRunner() override;
  ScheduleRunner(const ScheduleRunner&) = delete;
  ScheduleRunner& operator=(const ScheduleRunner&) = delete;

  Progress start() override;
  Progress step(bool* moved) override;

  // For kGate: the first `count` elements of the input may be used. `count` never shrinks.
  void release(size_t count) { released_ = count > released_ ? count : released_; }
  bool is_complete(int step) const { return state_[step].done == state_[step].segments; }
  const Schedule& schedule() const { return schedule_; }

 private:
  struct StepState {
    size_t segments = 0;
    size_t done = 0;
  };
  // The sends to one peer, or the receives from it, in the order of the schedule.
  struct Flow {
    Channel* channel = nullptr;
    int world_rank = -1;
    bool sends = false;
    std::vector<int> steps;
    size_t next = 0;  // the step to post from, and its segment
    size_t next_segment = 0;
    size_t oldest = 0;    // the step of the oldest transfer in flight
    uint64_t posted = 0;  // running numbers of transfers; the same on both sides
    uint64_t harvested = 0;
    std::vector<Transfer> transfers;       // as many as may be in flight; of transfer number n: n % its size
    std::unique_ptr<std::byte[]> staging;  // an area of staging_bytes for each, where something is reduced
    size_t staging_bytes = 0;              // the longest segment that is reduced

    bool in_flight() const { return posted > harvested; }
    bool needs_channel() const;
    size_t place_of(uint64_t number) const { return number % transfers.size(); }
  };
  struct Segment {
    size_t first = 0;  // element within the step
    size_t count = 0;
  };

  void add_to_flow(int step, const Group& group, std::vector<int>* flow_of);
  Segment segment(int step, size_t index) const;
  bool may_begin(int step, size_t index) const;
  std::byte* address(const Spot& spot, size_t element) const;
  bool has_finish() const { return task_.scale.post != 1.0 || task_.scale.divisor != 1; }

  bool post(Flow& flow);
  Status progress_channels(bool* any);
  bool harvest(Flow& flow);
  bool work_locally();
  void reduce_segment(const Step& step, const Segment& part, std::byte* incoming);
  void copy_segment(const Step& step, const Segment& part);
  void copy_run(const Step& step, const std::byte* from, std::byte* to, size_t count);
  void complete_segment(int step);
  Status blame(const Flow& flow, const Status& status) const;

  const Task task_;
  const Schedule schedule_;
  const PieceView view_;
  const size_t item_;  // bytes of an element
  const size_t segment_elements_;
  std::unique_ptr<std::byte[]> scratch_;
  std::vector<StepState> state_;  // [steps]
  std::vector<Flow> flows_;       // those with one peer are neighbours; never resized once transfers are posted
  std::vector<int> local_;        // the local steps in order
  size_t local_next_ = 0;
  size_t unfinished_ = 0;  // steps
  int complete_ = 0;       // all steps before this one are
  size_t released_ = 0;    // elements
};

}  // namespace hc
