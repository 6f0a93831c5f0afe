// Makes the schedules: one function per algorithm. schedule.h explains the terms.
#include "collective/channels/schedule.h"

#include <algorithm>
#include <bit>

namespace hc {
namespace {

// So that alltoall does not send to everybody at once (every receiver would get size-1 streams).
constexpr int kExchangesAhead = 4;
constexpr size_t kChunkAlignment = 16;  // elements; only where chunks are large enough for it not to matter

int wrap(int value, int size) { return ((value % size) + size) % size; }

Step send(int peer, int round, Spot from, size_t count) {
  return {.action = Action::kSend, .peer = peer, .round = round, .count = count, .from = from};
}
Step receive(int peer, int round, Spot to, size_t count) {
  return {.action = Action::kReceive, .peer = peer, .round = round, .count = count, .to = to};
}
Step copy(Spot from, Spot to, size_t count) {
  return {.action = Action::kCopy, .count = count, .from = from, .to = to};
}

StepRange only(int step) { return {std::max(step, 0), step}; }

// Makes `count` elements of the input usable at `home`; returns what has to be waited for.
int add_load(Schedule& s, Load load, Spot input, Spot home, size_t count) {
  if (load == Load::kNone) return -1;
  if (load == Load::kGate) return s.add({.action = Action::kGate, .count = count, .from = input});
  Step step = copy(input, home, count);
  step.prescale = true;
  return s.add(step);
}

// A group of one: scaling is all there is to do.
void add_lone_copy(Schedule& s, Load load, size_t count) {
  const Spot input{Place::kInput, 0}, output{Place::kOutput, 0};
  Step step = copy(input, output, count);
  if (load == Load::kGate) step.after[0] = add_load(s, load, input, output, count);
  step.prescale = step.finish = true;
  s.add(step);
}

struct Offsets {
  explicit Offsets(std::span<const size_t> counts) : at(counts.size() + 1, 0) {
    for (size_t i = 0; i < counts.size(); ++i) at[i + 1] = at[i] + counts[i];
  }
  std::vector<size_t> at;
};

// Adds the messages of the circulant graph. In round k rank r sends to r + skip[k] its sums of the chunks r + skip[k]
// to r + skip[k-1] - 1, all modulo the number of ranks, which skip halves, rounded up, until it is 1. So fewer and
// fewer sums stay, in the end that of chunk r. The same messages backwards gather what is summed.
class Circulant {
 public:
  // at: where each rank's chunk begins, and where the last one ends. home: where sums lie, and what is gathered.
  // divisible: no step has more than one chunk.
  Circulant(Schedule* s, int rank, std::vector<size_t> at, Place home, bool divisible)
      : s_(*s),
        rank_(rank),
        n_(static_cast<int>(at.size()) - 1),
        at_(std::move(at)),
        home_(home),
        divisible_(divisible) {
    for (skip_ = {n_}; skip_.back() > 1;) skip_.push_back((skip_.back() + 1) / 2);
    sent_.resize(skip_.size());
  }

  // This rank's own sum ends at `result`.
  void add_reduction(Load load, Spot result) {
    const int rounds = static_cast<int>(skip_.size()) - 1;
    const int left_out = n_ - skip_[1];  // the first round neither sends nor sums this chunk where the ranks are odd
    for (const auto& [begin, end] : {std::pair{skip_[1], n_}, std::pair{0, left_out}, std::pair{left_out, skip_[1]}})
      each_run(begin, end, [&, begin = begin](size_t first, size_t count) {
        const Spot input{Place::kInput, first};
        if (load == Load::kNone && begin == left_out) s_.add(copy(input, {home_, first}, count));
        add_load(s_, load, input, {home_, first}, count);
      });
    for (int k = 1; k <= rounds; ++k) {
      const StepRange before = all();
      const int skip = skip_[k], kept = skip_[k - 1] - skip;
      const Place source = k > 1 || load == Load::kCopy ? home_ : Place::kInput;
      each_run(skip, skip + kept, [&](size_t first, size_t count) {
        Step leave = send(wrap(rank_ + skip, n_), k, {source, first}, count);
        leave.after_all = before;
        sent_[k].push_back(s_.add(leave));
      });
      each_run(0, kept, [&](size_t first, size_t count) {
        Step sum{.action = Action::kReduce, .peer = wrap(rank_ - skip, n_), .round = k, .count = count};
        sum.from = {source, first};
        sum.finish = k == rounds;
        sum.to = sum.finish ? result : Spot{home_, first};
        sum.after_all = before;
        s_.add(sum);
      });
    }
    s_.rounds = rounds;
  }

  // Every rank's chunk to all. A partial sum has left before a chunk lands in its place.
  void add_allgather() {
    for (int k = static_cast<int>(skip_.size()) - 1; k >= 1; --k) {
      const StepRange before = all();
      const int skip = skip_[k], held = skip_[k - 1] - skip, round = ++s_.rounds;
      each_run(0, held, [&](size_t first, size_t count) {
        Step leave = send(wrap(rank_ - skip, n_), round, {home_, first}, count);
        leave.after_all = before;
        s_.add(leave);
      });
      size_t run = 0;
      each_run(skip, skip + held, [&](size_t first, size_t count) {
        Step land = receive(wrap(rank_ + skip, n_), round, {home_, first}, count);
        if (!sent_[k].empty()) land.after[0] = sent_[k][run++];
        s_.add(land);
      });
    }
  }

  // visit(first element, elements) for this rank's chunks begin .. end - 1: as few runs of neighbours as there are.
  template <class Visit>
  void each_run(int begin, int end, Visit visit) const {
    for (int next = begin; begin < end; begin = next) {
      next = divisible_ ? begin + 1 : rank_ + begin < n_ ? std::min(end, n_ - rank_) : end;  // up to the last chunk
      const size_t first = at_[wrap(rank_ + begin, n_)];
      visit(first, at_[wrap(rank_ + next - 1, n_) + 1] - first);
    }
  }

  StepRange all() const { return {0, static_cast<int>(s_.steps.size()) - 1}; }

 private:
  Schedule& s_;
  const int rank_, n_;
  const std::vector<size_t> at_;
  const Place home_;
  const bool divisible_;
  std::vector<int> skip_;
  std::vector<std::vector<int>> sent_;  // [round] the steps that sent partial sums, in order
};

}  // namespace

int Schedule::add(const Step& step) {
  if (step.count == 0) return -1;
  steps.push_back(step);
  return static_cast<int>(steps.size()) - 1;
}

size_t chunk_begin(size_t count, int chunks, int c) {
  if (c == chunks) return count;
  const auto n = static_cast<size_t>(chunks);
  const auto i = static_cast<size_t>(c);
  const size_t begin = count / n * i + count % n * i / n;  // = count * i / n without overflow
  return count >= 4 * kChunkAlignment * n ? begin / kChunkAlignment * kChunkAlignment : begin;
}

Schedule part_of(const Schedule& schedule, int part, int parts) {
  Schedule s{.name = schedule.name, .rounds = schedule.rounds, .scratch_count = schedule.scratch_count};
  std::vector<int> now(schedule.steps.size() + 1, -1);  // [1 + index before]
  std::vector<int> kept(schedule.steps.size() + 1, 0);  // how many of the steps before an index are still there
  for (size_t i = 0; i < schedule.steps.size(); ++i) {
    Step step = schedule.steps[i];
    const size_t begin = chunk_begin(step.count, parts, part);
    step.count = chunk_begin(step.count, parts, part + 1) - begin;
    step.from.first += begin;
    step.to.first += begin;
    for (int& earlier : step.after) earlier = now[static_cast<size_t>(earlier + 1)];
    step.after_all = {kept[static_cast<size_t>(step.after_all.first)],
                      kept[static_cast<size_t>(step.after_all.last + 1)] - 1};
    now[i + 1] = s.add(step);
    kept[i + 1] = static_cast<int>(s.steps.size());
  }
  return s;
}

Schedule plan_ring_allreduce(const AllreduceShape& shape) {
  const int n = shape.size, rank = shape.rank;
  Schedule s{.name = "ring", .rounds = 2 * (n - 1)};
  if (n == 1) return add_lone_copy(s, shape.load, shape.count), s;
  if (shape.pack) s.scratch_count = shape.count;
  const int left = wrap(rank - 1, n), right = wrap(rank + 1, n);
  auto first = [&](int c) { return chunk_begin(shape.count, n, c); };
  auto count = [&](int c) { return first(c + 1) - first(c); };
  auto home = [&](int c) { return Spot{shape.pack ? Place::kScratch : Place::kOutput, first(c)}; };
  auto input = [&](int c) { return Spot{Place::kInput, first(c)}; };
  auto source = [&](int c) { return shape.load == Load::kCopy ? home(c) : input(c); };

  // Per chunk: the step that brings it into use, that sent its partial sum, that made what `home` holds.
  std::vector<int> loaded(n, -1), sent(n, -1), made(n, -1);
  for (int k = 0; k < n; ++k) {  // in the order of use
    const int c = wrap(rank - 1 - k, n);
    loaded[c] = made[c] = add_load(s, shape.load, input(c), home(c), count(c));
  }
  for (int k = 0; k < n - 1; ++k) {  // reduce-scatter: afterwards chunk `rank` is complete here
    const int out = wrap(rank - 1 - k, n), in = wrap(rank - 2 - k, n);
    Step leave = send(right, k + 1, k == 0 ? source(out) : home(out), count(out));
    leave.after[0] = made[out];
    sent[out] = s.add(leave);
    Step sum{.action = Action::kReduce,
             .peer = left,
             .round = k + 1,
             .count = count(in),
             .from = source(in),
             .to = home(in)};
    sum.finish = k == n - 2;
    sum.after[0] = loaded[in];
    made[in] = s.add(sum);
  }
  for (int k = 0; k < n - 1; ++k) {  // allgather
    const int out = wrap(rank - k, n), in = wrap(rank - 1 - k, n);
    Step leave = send(right, n + k, home(out), count(out));
    leave.after[0] = made[out];
    s.add(leave);
    Step land = receive(left, n + k, home(in), count(in));
    land.after[0] = sent[in];  // the partial sum must have left before the result overwrites it
    made[in] = s.add(land);
  }
  for (int k = 0; shape.pack && k < n; ++k) {
    const int c = wrap(rank - k, n);
    Step store = copy(home(c), {Place::kOutput, first(c)}, count(c));
    store.after[0] = made[c];
    s.add(store);
  }
  return s;
}

Schedule plan_recursive_doubling(const AllreduceShape& shape) {
  const int n = shape.size, rank = shape.rank;
  const int core = static_cast<int>(std::bit_floor(static_cast<unsigned>(n)));  // ranks that double
  const int extra = n - core;                                                   // the first 2*extra ranks act in pairs
  const int stages = std::countr_zero(static_cast<unsigned>(core));
  Schedule s{.name = "recursive doubling", .rounds = stages + (extra ? 2 : 0)};
  if (n == 1) return add_lone_copy(s, shape.load, shape.count), s;
  if (shape.pack) s.scratch_count = shape.count;
  const Spot home{shape.pack ? Place::kScratch : Place::kOutput, 0};
  const Load load = shape.load == Load::kNone && !shape.in_place ? Load::kCopy : shape.load;
  int made = add_load(s, load, {Place::kInput, 0}, home, shape.count);
  int round = 0;
  auto add_send = [&](int peer) {
    Step step = send(peer, round, home, shape.count);
    step.after[0] = made;
    return s.add(step);
  };
  // after_send: the old sum must have left before the new one overwrites it.
  auto add_sum = [&](int peer, int after_send) {
    Step step{.action = Action::kReduce, .peer = peer, .round = round, .count = shape.count, .from = home, .to = home};
    step.incoming_first = peer < rank;
    step.finish = round == stages + (extra ? 1 : 0);
    step.after = {made, after_send, -1};
    return s.add(step);
  };

  const bool in_pair = rank < 2 * extra;
  if (extra) ++round;
  int gave = -1;
  if (in_pair && rank % 2 == 0) gave = add_send(rank + 1);
  if (in_pair && rank % 2 == 1) made = add_sum(rank - 1, -1);
  const bool doubles = !in_pair || rank % 2 == 1;
  const int mine = in_pair ? rank / 2 : rank - extra;  // number among those that double
  for (int bit = 1; bit < core; bit *= 2) {
    ++round;
    if (!doubles) continue;
    const int other = mine ^ bit;
    const int peer = other < extra ? 2 * other + 1 : other + extra;
    const int left = add_send(peer);
    made = add_sum(peer, left);
  }
  ++round;
  if (in_pair && doubles) add_send(rank - 1);
  if (in_pair && !doubles) {
    Step land = receive(rank + 1, round, home, shape.count);
    land.after[0] = gave;
    made = s.add(land);
  }
  if (shape.pack) {
    Step store = copy(home, {Place::kOutput, 0}, shape.count);
    store.after[0] = made;
    s.add(store);
  }
  return s;
}

Schedule plan_circulant_allreduce(const AllreduceShape& shape) {
  const int n = shape.size;
  Schedule s{.name = "circulant"};
  if (n == 1) return add_lone_copy(s, shape.load, shape.count), s;
  if (shape.pack) s.scratch_count = shape.count;
  std::vector<size_t> at;
  for (int c = 0; c <= n; ++c) at.push_back(chunk_begin(shape.count, n, c));
  const Spot result{shape.pack ? Place::kScratch : Place::kOutput, at[shape.rank]};
  Circulant graph(&s, shape.rank, std::move(at), result.place, shape.divisible);
  graph.add_reduction(shape.load, result);
  graph.add_allgather();
  const StepRange all = graph.all();
  if (shape.pack)
    graph.each_run(0, n, [&](size_t first, size_t count) {
      Step store = copy({result.place, first}, {Place::kOutput, first}, count);
      store.after_all = all;
      s.add(store);
    });
  return s;
}

Schedule plan_broadcast(const BroadcastShape& shape) {
  const int n = shape.size;
  const int stages = std::bit_width(static_cast<unsigned>(n - 1));
  Schedule s{.name = "binomial tree", .rounds = stages};
  const int mine = wrap(shape.rank - shape.root, n);  // number counted from the root
  auto rank_of = [&](int number) { return wrap(number + shape.root, n); };
  const Spot source{mine == 0 ? Place::kInput : Place::kOutput, 0};
  int stage = stages;  // my distance to the parent is 2^stage, to my children less
  int made = -1;
  if (mine != 0) {
    stage = std::countr_zero(static_cast<unsigned>(mine));
    made = s.add(receive(rank_of(mine - (1 << stage)), stages - stage, {Place::kOutput, 0}, shape.count));
  }
  while (stage-- > 0) {  // the largest subtree first
    const int child = mine + (1 << stage);
    if (child >= n) continue;
    Step leave = send(rank_of(child), stages - stage, source, shape.count);
    leave.after[0] = made;
    s.add(leave);
  }
  if (mine == 0 && !shape.in_place) s.add(copy(source, {Place::kOutput, 0}, shape.count));
  return s;
}

Schedule plan_reduce(const ReduceShape& shape) {
  const int n = shape.size;
  const int stages = std::bit_width(static_cast<unsigned>(n - 1));
  Schedule s{.name = "binomial tree", .rounds = stages};
  if (n == 1) return add_lone_copy(s, shape.load, shape.count), s;
  const int mine = wrap(shape.rank - shape.root, n);  // number counted from the root
  auto rank_of = [&](int number) { return wrap(number + shape.root, n); };
  const bool root = mine == 0, has_child = mine % 2 == 0 && mine + 1 < n, copies = shape.load == Load::kCopy;
  const Spot input{Place::kInput, 0}, home{root ? Place::kOutput : Place::kScratch, 0};
  if (!root && (has_child || copies)) s.scratch_count = shape.count;
  int made = add_load(s, shape.load, input, home, shape.count);
  Spot source = copies ? home : input;
  for (int stage = 0; stage < stages; ++stage) {
    if ((mine & (1 << stage)) != 0) {
      Step leave = send(rank_of(mine - (1 << stage)), stage + 1, source, shape.count);
      leave.after[0] = made;
      s.add(leave);
      break;
    }
    const int child = mine + (1 << stage);
    if (child >= n) continue;
    Step sum{.action = Action::kReduce, .peer = rank_of(child), .round = stage + 1, .count = shape.count};
    sum.from = source;
    sum.to = home;
    sum.incoming_first = false;
    sum.finish = root && stage == stages - 1;  // the root's last child always exists
    sum.after[0] = made;
    made = s.add(sum);
    source = home;
  }
  return s;
}

Schedule plan_gather(int rank, int root, std::span<const size_t> counts, bool in_place) {
  const int n = static_cast<int>(counts.size());
  const Offsets offset(counts);
  Schedule s{.name = "gather", .rounds = n > 1 ? 1 : 0};
  if (rank != root) return s.add(send(root, 1, {Place::kInput, 0}, counts[rank])), s;
  for (int k = 1; k < n; ++k) {
    const int from = wrap(root + k, n);
    s.add(receive(from, 1, {Place::kOutput, offset.at[from]}, counts[from]));
  }
  if (!in_place) s.add(copy({Place::kInput, 0}, {Place::kOutput, offset.at[root]}, counts[root]));
  return s;
}

Schedule plan_scatter(int rank, int root, std::span<const size_t> counts) {
  const int n = static_cast<int>(counts.size());
  const Offsets offset(counts);
  Schedule s{.name = "scatter", .rounds = n > 1 ? 1 : 0};
  if (rank != root) return s.add(receive(root, 1, {Place::kOutput, 0}, counts[rank])), s;
  for (int k = 1; k < n; ++k) {
    const int to = wrap(root + k, n);
    s.add(send(to, 1, {Place::kInput, offset.at[to]}, counts[to]));
  }
  s.add(copy({Place::kInput, offset.at[root]}, {Place::kOutput, 0}, counts[root]));
  return s;
}

Schedule plan_ring_allgather(int rank, std::span<const size_t> counts, bool in_place) {
  const int n = static_cast<int>(counts.size());
  const Offsets offset(counts);
  Schedule s{.name = "ring", .rounds = n - 1};
  const int left = wrap(rank - 1, n), right = wrap(rank + 1, n);
  auto home = [&](int c) { return Spot{Place::kOutput, offset.at[c]}; };
  if (!in_place) s.add(copy({Place::kInput, 0}, home(rank), counts[rank]));
  int made = -1;
  for (int k = 0; k < n - 1; ++k) {
    const int out = wrap(rank - k, n), in = wrap(rank - 1 - k, n);
    Step leave = send(right, k + 1, k == 0 && !in_place ? Spot{Place::kInput, 0} : home(out), counts[out]);
    leave.after[0] = made;
    s.add(leave);
    made = s.add(receive(left, k + 1, home(in), counts[in]));
  }
  return s;
}

Schedule plan_ring_reducescatter(int rank, std::span<const size_t> counts, Load load) {
  const int n = static_cast<int>(counts.size());
  const Offsets offset(counts);
  Schedule s{.name = "ring", .rounds = n - 1};
  if (n == 1) return add_lone_copy(s, load, counts[0]), s;
  const bool copies = load == Load::kCopy;
  const size_t longest = *std::max_element(counts.begin(), counts.end());
  s.scratch_count = copies ? offset.at[n] : static_cast<size_t>(std::min(n - 2, 2)) * longest;
  const int left = wrap(rank - 1, n), right = wrap(rank + 1, n);
  auto source = [&](int c) { return Spot{copies ? Place::kScratch : Place::kInput, offset.at[c]}; };
  // Partial sums: in the copy itself, else in two areas used alternately.
  auto partial = [&](int c, int k) { return copies ? source(c) : Spot{Place::kScratch, k % 2 * longest}; };

  std::vector<int> loaded(n, -1);
  for (int k = 0; k < n && copies;
       ++k) {  // in the order of use: the own chunk last, so that the output may be the input
    const int c = wrap(rank - 1 - k, n);
    loaded[c] = add_load(s, load, {Place::kInput, offset.at[c]}, source(c), counts[c]);
  }
  int made = loaded[wrap(rank - 1, n)];
  std::array<int, 2> sent_from{-1, -1};  // the last send out of each area
  for (int k = 0; k < n - 1; ++k) {
    const int out = wrap(rank - 1 - k, n), in = wrap(rank - 2 - k, n);
    Step leave = send(right, k + 1, k == 0 ? source(out) : partial(out, k - 1), counts[out]);
    leave.after[0] = made;
    const int sent = s.add(leave);
    if (k > 0 && !copies && sent >= 0) sent_from[(k - 1) % 2] = sent;
    const bool last = k == n - 2;
    Step sum{.action = Action::kReduce, .peer = left, .round = k + 1, .count = counts[in], .from = source(in)};
    sum.to = last ? Spot{Place::kOutput, 0} : partial(in, k);
    sum.finish = last;
    sum.after = {loaded[in], last ? -1 : sent_from[k % 2], -1};
    made = s.add(sum);
  }
  return s;
}

Schedule plan_circulant_allgather(int rank, std::span<const size_t> counts, bool in_place) {
  const Offsets offset(counts);
  Schedule s{.name = "circulant"};
  const Spot own{Place::kOutput, offset.at[rank]};
  if (!in_place) s.add(copy({Place::kInput, 0}, own, counts[rank]));
  Circulant(&s, rank, offset.at, Place::kOutput, false).add_allgather();
  return s;
}

Schedule plan_circulant_reducescatter(int rank, std::span<const size_t> counts, Load load) {
  const Offsets offset(counts);
  Schedule s{.name = "circulant", .scratch_count = offset.at.back()};
  if (counts.size() == 1) return s.scratch_count = 0, add_lone_copy(s, load, counts[0]), s;
  Circulant(&s, rank, offset.at, Place::kScratch, false).add_reduction(load, {Place::kOutput, 0});
  return s;
}

Schedule plan_pairwise_alltoall(const AlltoallShape& shape) {
  const int n = static_cast<int>(shape.sent.size()), rank = shape.rank;
  const Offsets sent_at(shape.sent), received_at(shape.received);
  Schedule s{.name = "pairwise exchange", .rounds = n - 1};
  const bool copies = shape.load == Load::kCopy;
  if (copies) s.scratch_count = sent_at.at[n];
  auto source = [&](int peer) { return Spot{copies ? Place::kScratch : Place::kInput, sent_at.at[peer]}; };
  int last_load = -1;
  if (copies) last_load = s.add(copy({Place::kInput, 0}, {Place::kScratch, 0}, sent_at.at[n]));
  std::vector<int> sent(n, -1);  // by round
  for (int k = 1; k < n; ++k) {
    const int to = wrap(rank + k, n), from = wrap(rank - k, n);
    Step leave = send(to, k, source(to), shape.sent[to]);
    // With a copy the first rounds wait for all of it; the later ones wait for these.
    const int ahead = k > kExchangesAhead ? sent[k - kExchangesAhead] : -1;
    leave.after_all = only(ahead < 0 ? last_load : ahead);
    sent[k] = s.add(leave);
    Step land = receive(from, k, {Place::kOutput, received_at.at[from]}, shape.received[from]);
    land.after_all = only(last_load);
    s.add(land);
  }
  s.add(copy(source(rank), {Place::kOutput, received_at.at[rank]}, shape.sent[rank]));
  return s;
}

Schedule plan_dissemination_barrier(int rank, int size) {
  const int rounds = std::bit_width(static_cast<unsigned>(size - 1));
  Schedule s{.name = "dissemination barrier", .rounds = rounds, .scratch_count = static_cast<size_t>(rounds)};
  int sent = -1, received = -1;
  for (int k = 0; k < rounds; ++k) {
    const int distance = 1 << k;
    // A send says "I have heard from the 2^k ranks before me", so it follows everything earlier.
    Step leave = send(wrap(rank + distance, size), k + 1, {Place::kInput, 0}, 1);
    leave.after = {sent, received, -1};
    sent = s.add(leave);
    received = s.add(receive(wrap(rank - distance, size), k + 1, {Place::kScratch, static_cast<size_t>(k)}, 1));
  }
  return s;
}

Schedule concatenate(std::span<const PlacedSchedule> parts, std::vector<int>* begin) {
  Schedule whole;
  for (const PlacedSchedule& part : parts) {
    const int base = static_cast<int>(whole.steps.size());
    begin->push_back(base);
    whole.name = part.schedule.name;
    whole.rounds = std::max(whole.rounds, part.schedule.rounds);
    for (Step step : part.schedule.steps) {
      step.from.first += part.first;
      step.to.first += part.first;
      for (int& a : step.after)
        if (a >= 0) a += base;
      step.after_all.first += base;
      step.after_all.last += base;
      whole.steps.push_back(step);
    }
  }
  return whole;
}

}  // namespace hc
