// Tables of a parameter server: ids, initial values, memory, repeated ids, shards as state machines.
#include <doctest/doctest.h>

#include <cmath>
#include <map>
#include <random>
#include <vector>

#include "server/shard.h"
#include "server/table.h"

namespace hc::table_tests {
namespace {

TableSpec spec_of(Rule rule, uint32_t dim) {
  TableSpec spec;
  spec.name = "t";
  spec.dim = dim;
  spec.optimizer.rule = rule;
  return spec;
}

std::vector<float> read(const Table& table, std::vector<int64_t> ids) {
  std::vector<float> out(ids.size() * table.spec().dim);
  table.read(ids, out.data());
  return out;
}

void push(Table* table, const std::vector<int64_t>& ids, const std::vector<float>& gradients) {
  std::vector<uint32_t> slots;
  REQUIRE(table->find_or_make(ids, &slots).is_ok());
  table->reserve_step(ids.size());
  const Table::Gradients one{slots, gradients.data()};
  table->update({&one, 1}, 1.0f);
}

TEST_CASE("a table: random ids against a map") {
  MemoryBudget budget(64 << 20);
  Table table(spec_of(Rule::kSum, 3), &budget);
  std::map<int64_t, float> expected;
  std::mt19937_64 random(5);
  for (int step = 0; step < 200; ++step) {
    std::vector<int64_t> ids;
    std::vector<float> gradients;
    for (int i = 0; i < 50; ++i) {  // some twice in a step, extremes among them
      int64_t id = static_cast<int64_t>(random() % 700) - 350;
      if (i == 0) id = INT64_MIN;
      if (i == 1) id = INT64_MAX;
      ids.push_back(id);
      expected[id] += static_cast<float>(i);
      for (int k = 0; k < 3; ++k) gradients.push_back(static_cast<float>(i));
    }
    push(&table, ids, gradients);
  }
  CHECK(table.rows() == expected.size());
  CHECK(table.steps() == 200);
  for (const auto& [id, sum] : expected) {
    const std::vector<float> row = read(table, {id});
    CHECK(row == std::vector<float>{sum, sum, sum});
  }
  CHECK(read(table, {12345678}) == std::vector<float>{0, 0, 0});  // unknown, and still so
  CHECK(table.rows() == expected.size());
}

TEST_CASE("a table: an id has its initial values before and after it is made, in every table alike") {
  MemoryBudget budget(1 << 24);
  TableSpec spec = spec_of(Rule::kSum, 64);
  spec.initial = Initial::kNormal;
  spec.spread = 2;
  spec.seed = 9;
  Table one(spec, &budget), other(spec, &budget);
  const std::vector<float> before = read(one, {77, -3});
  push(&one, {77, -3}, std::vector<float>(128, 0.0f));
  CHECK(read(one, {77, -3}) == before);
  CHECK(read(other, {77, -3}) == before);
  double mean = 0, squares = 0;
  std::vector<int64_t> ids(500);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i);
  const std::vector<float> many = read(one, ids);
  for (float x : many) mean += static_cast<double>(x), squares += static_cast<double>(x) * static_cast<double>(x);
  CHECK(std::abs(mean / static_cast<double>(many.size())) < 0.05);
  CHECK(std::abs(std::sqrt(squares / static_cast<double>(many.size())) - 2) < 0.05);
}

TEST_CASE("a table: when its memory is used up nothing has changed, and the error says what to do") {
  MemoryBudget budget(3 << 20);
  Table table(spec_of(Rule::kAdam, 64), &budget);
  std::vector<uint32_t> slots;
  std::vector<int64_t> ids(1000);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i);
  REQUIRE(table.find_or_make(ids, &slots).is_ok());
  std::vector<int64_t> more(100000);
  for (size_t i = 0; i < more.size(); ++i) more[i] = static_cast<int64_t>(i) + 500;
  const Status status = table.find_or_make(more, &slots);
  CHECK(status.code() == Code::kInternal);
  CHECK(status.text().find("--memory") != std::string::npos);
  CHECK(table.rows() == 1000);
  REQUIRE(table.find_or_make(ids, &slots).is_ok());
  CHECK(slots[999] == 999);
}

TEST_CASE("a table whose description makes no sense is refused") {
  const auto refused = [](const auto& change) {
    TableSpec spec = spec_of(Rule::kSum, 1);
    CHECK(spec.check().is_ok());
    change(&spec);
    return spec.check().code() == Code::kInvalidArgument;
  };
  for (int workers : {0, -1}) CHECK(refused([&](TableSpec* spec) { spec->workers = workers; }));
  CHECK(refused([](TableSpec* spec) { spec->staleness = -2; }));
  CHECK(refused([](TableSpec* spec) { spec->dim = 0; }));
  CHECK(refused([](TableSpec* spec) { spec->name.clear(); }));
  CHECK(refused([](TableSpec* spec) { spec->optimizer.beta1 = 1; }));
}

TEST_CASE("partitions get equal parts of consecutive ids") {
  for (uint32_t partitions : {1u, 2u, 3u, 16u}) {
    std::vector<int> counts(partitions, 0);
    for (int64_t id = 0; id < 60000; ++id) ++counts.at(partition_of(id, partitions));
    for (int count : counts) CHECK(std::abs(count - 60000.0 / partitions) < 0.05 * 60000 / partitions + 100);
  }
}

// --- shards ---

struct Sender {
  Shard* shard;
  uint64_t worker;
  uint64_t sequence = 0;
  Status send(Verb verb, std::vector<uint8_t> payload, int64_t clock = 0, uint64_t count = 0, bool again = false) {
    FrameHeader header;
    header.verb = verb;
    header.table = table_hash("t");
    header.worker = worker;
    header.clock = clock;
    header.count = count;
    if (verb == Verb::kPush) header.sequence = again ? sequence : ++sequence;
    FrameHeader answer;
    return shard->apply(header, payload, &answer);
  }
  Status push(int64_t id, float value, int64_t clock, bool again = false) {
    Writer payload;
    payload.put(id);
    payload.put(value);
    return send(Verb::kPush, {payload.bytes().begin(), payload.bytes().end()}, clock, 1, again);
  }
};

std::vector<uint8_t> described(const TableSpec& spec) {
  Writer payload;
  spec.write(&payload);
  return {payload.bytes().begin(), payload.bytes().end()};
}

std::vector<uint8_t> rank_payload(int32_t rank) {
  Writer payload;
  payload.put(rank);
  return {payload.bytes().begin(), payload.bytes().end()};
}

float value_of(const Shard& shard, int64_t id) {
  float value = 0;
  shard.table(table_hash("t"))->read({&id, 1}, &value);
  return value;
}

struct TwoWorkers {
  explicit TwoWorkers(int32_t staleness) : shard(&budget), first{&shard, 11}, second{&shard, 22} {
    TableSpec spec = spec_of(Rule::kSum, 1);
    spec.workers = 2;
    spec.staleness = staleness;
    REQUIRE(first.send(Verb::kTable, described(spec)).is_ok());
    REQUIRE(first.send(Verb::kRegister, rank_payload(0)).is_ok());
  }
  bool may_pull(int64_t clock, std::string* missing) const {
    FrameHeader header;
    header.table = table_hash("t");
    header.clock = clock;
    return shard.may_pull(header, missing);
  }
  MemoryBudget budget{1 << 24};
  Shard shard;
  Sender first, second;
};

TEST_CASE("a shard does each numbered change once") {
  TwoWorkers both(-1);
  REQUIRE(both.first.push(5, 1, 0).is_ok());
  REQUIRE(both.first.push(5, 1, 0, true).is_ok());
  CHECK(value_of(both.shard, 5) == 1);
  CHECK(both.second.push(5, 1, 0).code() == Code::kInvalidArgument);  // has not registered
  CHECK(value_of(both.shard, 5) == 1);
}

TEST_CASE("a shard in rounds: one step of the mean when all have pushed, and who leaves holds up nobody") {
  TwoWorkers both(0);
  std::string missing;
  REQUIRE(both.first.push(5, 1, 0).is_ok());
  CHECK(value_of(both.shard, 5) == 0);
  CHECK_FALSE(both.may_pull(1, &missing));
  CHECK(missing == "rank 1 never came");
  REQUIRE(both.second.send(Verb::kRegister, rank_payload(1)).is_ok());
  CHECK_FALSE(both.may_pull(1, &missing));
  CHECK(missing == "rank 1 is at step 0");
  REQUIRE(both.second.push(5, 4, 0).is_ok());
  CHECK(value_of(both.shard, 5) == 2.5f);
  CHECK(both.may_pull(1, &missing));
  REQUIRE(both.first.push(5, 1, 1).is_ok());
  REQUIRE(both.second.send(Verb::kLeave, {}).is_ok());
  CHECK(value_of(both.shard, 5) == 3.5f);
  REQUIRE(both.first.push(5, 1, 2).is_ok());
  CHECK(value_of(both.shard, 5) == 4.5f);
  const Status late = both.second.push(5, 1, 1);  // its round is over
  CHECK(late.code() == Code::kAborted);
  CHECK(value_of(both.shard, 5) == 4.5f);
}

TEST_CASE("a shard with staleness 2 lets nobody be more than two steps ahead") {
  TwoWorkers both(2);
  std::string missing;
  REQUIRE(both.second.send(Verb::kRegister, rank_payload(1)).is_ok());
  for (int64_t clock = 0; clock < 3; ++clock) REQUIRE(both.first.push(5, 1, clock).is_ok());
  CHECK(both.may_pull(2, &missing));
  CHECK_FALSE(both.may_pull(3, &missing));
  CHECK(missing == "rank 1 is at step 0");
  REQUIRE(both.second.push(5, 1, 0).is_ok());
  CHECK(both.may_pull(3, &missing));
}

TEST_CASE("a copy of a shard goes on like the shard itself, with a round under way") {
  TwoWorkers both(0);
  REQUIRE(both.second.send(Verb::kRegister, rank_payload(1)).is_ok());
  REQUIRE(both.first.push(5, 1, 0).is_ok());
  REQUIRE(both.second.push(6, 1, 0).is_ok());
  REQUIRE(both.first.push(5, 3, 1).is_ok());
  Shard copy(&both.budget);
  FrameHeader header;
  header.verb = Verb::kMetadata;
  REQUIRE(copy.apply(header, both.shard.metadata(), nullptr).is_ok());
  size_t from = 0;
  Buffer rows;
  for (uint64_t table : both.shard.tables()) {
    while (both.shard.rows(table, &from, 16, &header, &rows))
      REQUIRE(copy.apply(header, rows.bytes(), nullptr).is_ok());
  }
  Sender same{&copy, 22, both.second.sequence};
  REQUIRE(same.push(5, 5, 1).is_ok());
  REQUIRE(both.second.push(5, 5, 1).is_ok());
  for (int64_t id : {5, 6}) CHECK(value_of(copy, id) == value_of(both.shard, id));
  CHECK(value_of(copy, 5) == 4.5f);
  CHECK(copy.metadata() == both.shard.metadata());
}

TEST_CASE("a shard takes no frame whose numbers do not fit") {
  TwoWorkers both(-1);
  CHECK(both.first.send(Verb::kPush, std::vector<uint8_t>(11), 0, 1).code() == Code::kInvalidArgument);
  CHECK(both.first.send(Verb::kPush, {}, 0, UINT64_MAX / 8).code() == Code::kInvalidArgument);
  CHECK(both.first.send(Verb::kTable, std::vector<uint8_t>(9, 255)).code() == Code::kInvalidArgument);
  TableSpec other = spec_of(Rule::kSum, 2);
  other.workers = 2;
  CHECK(both.first.send(Verb::kTable, described(other)).code() == Code::kMismatch);
  std::vector<uint8_t> damaged = both.shard.metadata();
  damaged.resize(damaged.size() / 2);
  Shard copy(&both.budget);
  FrameHeader header;
  header.verb = Verb::kMetadata;
  CHECK_FALSE(copy.apply(header, damaged, nullptr).is_ok());
}

}  // namespace
}  // namespace hc::table_tests
