// The engine: takes operations in any order, has them agreed on, runs them, completes their handles. An object: four
// ranks can be four engines in one process.
//
// Threads: submit, poll, wait, release ... from any. One thread at a time drives (DriveGate): a thread that waits for
// a handle, else hc-engine, which sleeps in poll(2) on the mesh. Completion callbacks run on hc-notify.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "agreement/frames.h"
#include "base/config.h"
#include "base/log.h"
#include "base/status.h"
#include "base/thread.h"
#include "engine/gpu/device_turns.h"
#include "engine/intake/operation.h"
#include "engine/point_to_point/messages.h"
#include "engine/progress/drive_gate.h"
#include "engine/progress/liveness.h"
#include "engine/progress/notifier.h"
#include "engine/sets/process_set.h"
#include "engine/tune/autotuner.h"
#include "engine/watch/inquiry.h"
#include "engine/watch/recorder.h"
#include "engine/watch/stack_source.h"
#include "engine/watch/timeline.h"
#include "net/mesh.h"

namespace hc {

// What submit takes. Pointers are read during the call only; the tensors' memory must live until the handle is done.
struct Submission {
  Op op = Op::kAllreduce;
  Reduce reduce = Reduce::kSum;
  int root = 0;  // world rank; of a message the other's, -1 = receive from any
  int process_set = 0;
  std::string_view name;  // empty: unnamed
  double prescale = 1, postscale = 1;
  struct Tensor {
    const void* in;
    void* out;  // null: the core owns the result
    std::span<const int64_t> shape;
    DType dtype;
  };
  std::span<const Tensor> tensors;
  std::span<const int64_t> splits;
  int64_t tag = 0;       // messages
  int32_t priority = 0;  // higher runs before lower, once both are ready
  bool will_wait = false;
  // Tensors in the memory of a GPU (join: the GPU that stands in for this rank's tensors).
  bool on_device = false;
  int device_index = 0;
  CuStream stream = nullptr;      // it produces the input,
  CuEvent ready_event = nullptr;  // or this event, recorded behind it; lives until the operation is done
  void (*done)(void*, int64_t, const Status&) = nullptr;
  void* done_context = nullptr;
};

// What changes between two submissions of a declared bucket.
struct DeclaredCall {
  DeclaredCall(CuStream stream, int32_t priority = 0) : stream(stream), priority(priority) {}
  CuStream stream;   // it fills a bucket on a GPU
  int32_t priority;  // as Submission::priority; a frozen plan knows none
};

struct EngineCounters {  // driving thread writes, anyone reads
  std::atomic<uint64_t> operations{0}, batches{0}, fused{0}, plans_sent{0}, ballots_sent{0}, control_frames_sent{0},
      control_bytes_sent{0}, bytes_reduced{0}, frozen{0}, express{0}, sleeps{0}, steps{0}, pings{0};
  std::atomic<uint64_t> between_nodes_frames{0}, between_nodes_bytes{0};  // of control, sent and received
};

class Engine {
 public:
  static Result<std::unique_ptr<Engine>> create(Config config);
  ~Engine();
  std::string endpoint() const { return mesh_->endpoint(); }
  Status connect(const MeshMembers& members);

  const Mesh& mesh() const { return *mesh_; }
  Status submit(const Submission& submission, int64_t* handle);
  // Submits for a caller that waits at once. *handle: 0 when the call is over already, with success; then it has left
  // nothing to take or to release.
  Status call(const Submission& submission, int64_t* handle);
  // Collective over the process set: declares an optimizer's buckets (see BucketSet), whose memory must live until
  // undeclare.
  Status declare(int process_set, BucketSet buckets, int* id);
  Status undeclare(int process_set, int id);
  // stream: what fills a bucket in the memory of a GPU.
  Status submit_declared(int process_set, int bucket_set, int bucket, DeclaredCall call, int64_t* handle);
  // True when done, failed or unknown.
  bool poll(int64_t handle);
  // Drives until done or until timeout_s has passed (< 0: no limit). The status is the operation's own.
  Status wait(int64_t handle, double timeout_s, bool* done);
  // The operation behind a handle that is done; null when it is not, or unknown.
  Operation* finished(int64_t handle);
  void release(int64_t handle) { handles_.release(handle); }
  bool release_if_succeeded(int64_t handle) { return handles_.release_if_succeeded(handle); }
  // engine_device.cc. Of an operation on device memory that is done, which means enqueued: makes `stream` wait for its
  // result, also (when `to` is not null) copies result i there, behind that.
  Status stream_wait(int64_t handle, CuStream stream);
  Status copy_result(int64_t handle, size_t i, void* to, size_t bytes, CuStream stream);

  // Collective over the world, in the same order on every rank.
  Status add_process_set(std::vector<int> ranks, int* id);
  Status remove_process_set(int id);
  // Any thread; size 0: there is no such set. rank: this one's place in it, -1 when it is no member.
  struct Place {
    int size = 0, rank = -1;
  };
  Place place_in(int process_set);
  Result<std::shared_ptr<Memory>> allocate(size_t bytes);
  // Memory of a GPU that NCCL can be told of; declared buckets in it are. Unsupported, with the reason, where it
  // cannot.
  Result<std::shared_ptr<Memory>> allocate_on_device(int device_index, size_t bytes);
  bool shares_memory() const;

  void abort(const std::string& text);
  // abort() by who waits for `handle` and cannot go on: "<this rank> <text> during <the operation>".
  void break_off(int64_t handle, const std::string& text);
  Status shutdown(double timeout_s);
  void after_fork_child();
  std::string counters_json() const;
  std::string describe();

  // engine_observe.cc. The timeline is written by rank 0, or by every rank into a file of its own.
  Status start_timeline(const std::string& path, bool mark_cycles);
  Status stop_timeline();
  // This rank's last operations, as JSON.
  std::string flight_record(const std::string& reason);
  // Before connect: see StackSource.
  void watch_stack(int signal, int fd, int thread) { stack_source_.watch(signal, fd, thread); }

 private:
  explicit Engine(Config config);
  Status agree_on_settings(const MeshMembers& members);
  Status run_in_init(const Submission& s, const MeshMembers& members);
  Status meet_in_init(std::string_view name, const MeshMembers& members);

  // engine_select.cc
  enum class SelectionSource { kFixed, kGiven, kProbe };
  Status select(const MeshMembers& members);
  Status start_selection(Tuning* start, SelectionSource* source) const;
  Status probe_flat(const MeshMembers& members);
  Status time_turns(const MeshMembers& members, const std::string& name, std::vector<float>* values, double* took_s);
  struct WayTimes;
  Status use_mpi(bool on);
  Status choose_way_between_nodes(const MeshMembers& members);
  Status time_ways(const MeshMembers& members, int round, size_t bytes, WayTimes* times);

  bool may_be_two_level(const ProcessSet& set) const;

  // engine_check.cc
  Status check(const Submission& s, const ProcessSet& set) const;

  // engine_submit.cc
  Status queue_locked(const Submission& s, const std::pair<int, int>* bucket, int64_t* handle,
                      std::unique_ptr<DeviceWork> device = nullptr);
  void fill(Operation* op, const Submission& s, const ProcessSet& set);
  Status fill_declared(int process_set, std::pair<int, int> which, Submission* s, Submission::Tensor* tensor) const;
  bool goes_in_place(const Submission& s, bool declared) const;
  bool arena_holds(const Submission& s) const;

  // engine_repeat.cc
  bool repeat(const Submission& s, int64_t* handle);
  bool may_repeat(const ProcessSet& set) const;
  bool is_tuning(const ProcessSet& set) const;

  // engine_capture.cc
  Status refuse_captured(const Submission& s, Gpu& gpu) const;
  Status capture_declared(const Submission& s, std::pair<int, int> which, int64_t* handle);
  Status capture_in_gate(const Submission& s, std::pair<int, int> which, std::unique_ptr<DeviceWork> work,
                         int64_t* handle);

  // engine_device_memory.cc
  Result<std::shared_ptr<const NcclApi>> nccl_of_memory(const Gpu& gpu);
  bool find_memory(BucketSet* buckets);
  void register_buckets(ProcessSet& set, const BucketSet& buckets);

  // engine_device.cc
  Result<std::shared_ptr<Gpu>> adopt_gpu(int index);
  Result<std::unique_ptr<DeviceWork>> prepare_device(const Submission& s);
  std::unique_ptr<DeviceWork> offer_device(int index);
  void settle_device(Operation* op);
  DeviceOptions device_options() const;
  void put_on_device(ProcessSet& set);
  void device_batch_over(ProcessSet& set);
  bool may_freeze_on_device(const ProcessSet& set, const BucketSet& buckets) const;
  void arm(ProcessSet& set, Operation* op);
  void launch_armed(ProcessSet& set, bool* moved);
  std::unique_ptr<BatchRunner> runner_of_armed(ProcessSet& set, Operation* op);
  bool device_in_flight();
  void check_device();
  void device_failed(const Status& status);
  void blame_for_device(TimePoint now);
  Status with_words_of_device(const Status& reason);
  void leave_devices();

  // engine_device_turns.cc
  void note_turns_before(const ProcessSet& set, Plan* plan);
  void order_device_batches(ProcessSet& set, const Plan& plan);
  void grant_device_turns(uint16_t set, uint32_t count);
  void ask_message_turn(int receiver, uint32_t id);
  void grant_message_turn(int sender, int receiver, uint32_t id);
  Status send_turn(int rank, const DeviceTurn& turn, uint32_t count);
  Status take_device_frame(FrameKind kind, int from, Reader* in);
  Status take_turn_frame(int from, Reader* in);
  bool has_part_in(const DeviceTurn& turn) const;
  void take_turns(bool* moved);
  void pass_turns_on();

  // engine_step.cc
  bool step();  // true: something has moved
  bool advance();
  void take_incoming(bool* moved);
  void receive_frames(bool* moved);
  void count_between_nodes(int peer, size_t frame_bytes);
  void handle_frame(int from, std::span<const uint8_t> frame);
  void send_ballot(ProcessSet& set);
  void decide(ProcessSet& set, bool* moved);
  bool gathers(ProcessSet& set);
  void take_plan(ProcessSet& set, Plan plan);
  Status begin_batch(ProcessSet& set, PlanBatch batch);
  void run_queue(ProcessSet& set, bool* moved);
  void wake_readers(ProcessSet& set);
  void finish_batch(ProcessSet& set);

  // engine_tree.cc
  Status take_ballots(int from, Reader* in);
  void send_up(ProcessSet& set);
  Status send_ballots(ProcessSet& set, std::span<Ballot> ballots);
  Status send_down(ProcessSet& set, const Plan& plan, std::span<const uint8_t> frame);
  Status tell_to_show(ProcessSet& set, uint8_t how);
  Status take_show_frame(int from, Reader* in);
  void reveal_late(TimePoint now);

  // engine_state.cc
  Status barrier(int process_set, const std::string& name);
  Status agree(int process_set, const std::string& name, int64_t (&mine)[3], int64_t (&least)[3], int64_t (&most)[3]);
  bool declared_in_arena(const BucketSet& buckets) const;
  void complete(ProcessSet& set, Operation* op, Status status);
  void finish(Operation* op, Status status);
  Status send_frame(int to, bool urgent);  // the frame in frame_

  // engine.cc
  void attach_messages();
  size_t express_limit(const ProcessSet& set) const;
  std::unique_ptr<ProcessSet> make_set(uint16_t id, std::vector<int> ranks);
  void tell_sizes(ProcessSet* set, const Tuning& tuning) const;
  ProcessSet* find_set(int id) const;

  // engine_drive.cc: waiting, sleeping, failing
  void run();  // hc-engine
  using Over = std::function<bool()>;
  // Drives, or lets another thread drive, until over() or the deadline. `over` must be safe from any thread when
  // `shared`, else it is only called while this thread drives, which then comes before those that wait.
  bool drive_until(const Over& over, bool shared, const Deadline& deadline);
  void drive(const Over& over, const Deadline& deadline);
  void rest_after_driving();
  void enter_gate();
  void leave_gate();
  // From here to the end of the scope no other thread steps the engine.
  class GateHold {
   public:
    explicit GateHold(Engine* engine) : engine_(*engine) { engine_.enter_gate(); }
    ~GateHold() { engine_.leave_gate(); }
    GateHold(const GateHold&) = delete;
    GateHold& operator=(const GateHold&) = delete;

   private:
    Engine& engine_;
  };
  int64_t work_until_idle();
  int64_t longest_sleep_us(int limit_ms) const;
  void sleep_on_mesh(int64_t us);
  void poll_mesh(bool* moved);
  void check_timers();
  void check_liveness(TimePoint now);
  void fail_everything(const Status& reason);
  void fail_after(const std::exception& thrown);
  void peer_left(int rank, const std::string& text);
  size_t outstanding() const;
  void tell_everybody(const Status& reason);
  void say_goodbye(double timeout_s);
  void end_thread();
  void fail_latecomers();

  // engine_stall.cc
  struct StallFacts {
    std::set<int> late;  // world ranks
    double longest_s = 0;
  };
  void report_stalls(TimePoint now);
  std::string coordinated_stalls(const ProcessSet& set, TimePoint now, StallFacts* facts) const;
  std::string frozen_stalls(const ProcessSet& set, TimePoint now, StallFacts* facts) const;
  void open_inquiry(const std::set<int>& late, TimePoint now);
  Status answer_inquiry(int from, bool asked);
  std::string testimony();

  // engine_observe.cc
  void start_configured_timeline();
  void measure_clock(Trace::Origin* origin);
  void ask_clock();
  Status take_clock_frame(FrameKind kind, int from, Reader* in);
  Status take_report_frame(FrameKind kind, int from, Reader* in);
  void save_record(const std::string& reason);
  void note_batch(const ProcessSet& set, TimePoint planned);
  void note_arrival(ProcessSet& set, TimePoint submitted, const FrozenCollective::Arrival& arrival);
  void note_frozen(ProcessSet& set, const Operation& op, const FrozenCollective& run);
  void note_done(const Operation& op, const Status& status);
  const char* selected_by() const;

  // engine_tune.cc
  void start_tuner();
  void open_tune_log();
  void write_tune_log(std::string text);
  void tune(const Operation& op);
  void adopt(const Tuning& tuning);

  Config config_;  // constant after connect
  Logger log_;
  std::unique_ptr<Mesh> mesh_;
  uint32_t generation_ = 0;
  double timer_s_ = 1;
  int spin_pauses_ = 0;

  Handles handles_;
  DriveGate gate_;
  Timeline timeline_;
  Recorder recorder_;  // submitted: submit lock
  StackSource stack_source_;
  Notifier notifier_;  // its thread uses the recorder
  EngineCounters counters_;
  NamedThread thread_;

  Operation repeating_;           // stands in NameRecord::pending for a call under way in repeat()
  mutable std::mutex submit_mu_;  // guards incoming_, failure_ and the parts of ProcessSet marked "submit lock"
  std::vector<Operation*> incoming_;
  Status failure_;  // not ok: submit refuses with it
  std::atomic<bool> has_incoming_{false};
  std::atomic<bool> failed_{false};
  std::atomic<bool> connected_{false};
  std::atomic<bool> stopping_{false};
  std::atomic<int> sleepers_{0};            // threads in poll(2) on the mesh
  std::atomic<bool> untimed_sleep_{false};  // hc-engine sleeps without a time limit
  std::atomic<bool> engine_sleeps_{false};
  std::mutex device_mu_;  // guards the four below
  std::shared_ptr<Gpu> gpu_;
  std::shared_ptr<Gpu> offered_gpu_;                        // what may come can come there, while there is no gpu_
  std::shared_ptr<const NcclApi> memory_nccl_;              // null: not looked for, or not found
  std::map<std::byte*, std::weak_ptr<Memory>> gpu_memory_;  // of allocate_on_device
  std::atomic<bool> has_gpu_{false};
  std::atomic<bool> by_mpi_{false};  // data between nodes
  std::atomic<int> way_probes_{0};   // sizes at which both ways were tried; 0: the choice was given
  std::atomic<SelectionSource> selection_source_{SelectionSource::kFixed};
  std::mutex abort_mu_;  // guards abort_text_
  std::string abort_text_;
  std::atomic<bool> has_abort_{false};
  mutable std::mutex tuning_mu_;  // guards tuning_shown_
  Tuning tuning_shown_;           // tuning_, for counters

  // Driving thread only (the map also changes in add/remove, which hold the gate and the submit lock).
  std::map<int, std::unique_ptr<ProcessSet>> sets_;
  std::vector<std::unique_ptr<ProcessSet>> retired_;  // removed sets: their lanes may still be read by late peers
  std::vector<Operation*> taken_;
  size_t next_taken_ = 0;  // index in it
  Writer frame_;
  std::vector<uint8_t> received_;
  std::vector<bool> left_;        // [world] said goodbye
  std::string departure_;         // the first goodbye that came in
  DeviceTurns device_turns_;      // whose work on a device comes next
  bool waits_on_device_ = false;  // in this step: look again soon
  Status device_failure_;         // what CUDA or NCCL said; who is to blame may still be on its way here
  TimePoint device_failed_at_{};
  Liveness liveness_{0, {}};
  Messages messages_;
  TimePoint next_gathered_ = TimePoint::max();  // when the first gathering window of the last step() closes
  TimePoint next_timer_{}, next_stall_report_{}, last_mismatch_save_{};
  Inquiry inquiry_;
  size_t flat_bytes_ = 16 * kKiB;     // agreed, and changed by no probe; constant after connect
  Tuning agreed_tuning_;              // rank 0's settings at init; constant after connect
  Tuning tuning_;                     // the newest that this rank knows of; its coordinators pass it on
  std::unique_ptr<Autotuner> tuner_;  // on rank 0 while it searches
  bool tuned_ = false;                // a plan has brought settings
  bool tune_log_open_ = false;
  struct ClockAgainstRank0 {
    int rounds_left = 0;
    double ahead_s = 0, error_s = 1e9;
  } clock_;
  unsigned turn_ = 0;
  int calls_without_a_look_ = 0;  // that repeat() may have served since the engine last had one
  bool may_fill_ = false;         // nobody waits, and hc-engine does not go to sleep: a ballot may wait for company
  bool fills_ = false;            // in this step one did
};

}  // namespace hc
