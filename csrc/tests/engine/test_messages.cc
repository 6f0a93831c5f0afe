// Send and receive in worlds of engines, in shared memory and over TCP: order, tags, sizes from nothing to many
// segments, messages that do not fit, to oneself, peers that leave, stalls.
#include <doctest/doctest.h>

#include <numeric>

#include "tests/locked_checks.h"
#include "tests/world.h"

namespace hc {
namespace {

Settings settings_of_messages(bool shared) {
  if (shared) return {};
  return {{"HOROCLONE_SHARED_MEMORY", "0"},
          {"HOROCLONE_SEGMENT_BYTES", "4096"},
          {"HOROCLONE_SOCKET_BUFFER_BYTES", "16384"}};
}

struct To {
  int peer;
  int64_t tag = 0;
  int process_set = 0;
};

template <class T>
Status start_send(Engine& engine, To to, const std::vector<T>& data, int64_t* handle) {
  return submit(engine, Op::kSend, "", data, static_cast<std::vector<T>*>(nullptr), {static_cast<int64_t>(data.size())},
                handle, [&](Submission& s) {
                  s.root = to.peer;
                  s.tag = to.tag;
                  s.process_set = to.process_set;
                });
}
template <class T>
Status start_receive(Engine& engine, To from, std::vector<T>* data, int64_t* handle) {
  return submit(engine, Op::kReceive, "", std::vector<T>(), data, {data ? static_cast<int64_t>(data->size()) : 0},
                handle, [&](Submission& s) {
                  s.root = from.peer;
                  s.tag = from.tag;
                  s.process_set = from.process_set;
                  if (!data) s.tensors = {};
                });
}
template <class T>
Status send(Engine& engine, To to, const std::vector<T>& data) {
  int64_t handle = 0;
  HC_TRY(start_send(engine, to, data, &handle));
  Status status = finish(engine, handle);
  engine.release(handle);
  return status;
}
template <class T>
Status receive(Engine& engine, To from, std::vector<T>* data) {
  int64_t handle = 0;
  HC_TRY(start_receive(engine, from, data, &handle));
  Status status = finish(engine, handle);
  engine.release(handle);
  return status;
}
// Without a tensor: takes what comes.
Status receive_any_size(Engine& engine, To from, std::vector<int32_t>* data, int* source = nullptr) {
  int64_t handle = 0;
  HC_TRY(start_receive<int32_t>(engine, from, nullptr, &handle));
  HC_TRY(finish(engine, handle));
  Operation* op = engine.finished(handle);
  const auto* values = reinterpret_cast<const int32_t*>(op->results[0]->data());
  data->assign(values, values + op->received->count());
  if (source) *source = op->source;
  engine.release(handle);
  return Status::ok();
}

std::vector<int32_t> numbers(size_t n, int first) {
  std::vector<int32_t> v(n);
  std::iota(v.begin(), v.end(), first);
  return v;
}

TEST_CASE("messages of every size arrive whole, into a given tensor and a new one") {
  for (bool shared : {true, false}) {
    World world(2, settings_of_messages(shared));
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      for (size_t n : {0, 1, 1000, 2048, 2049, 50000, 1000003}) {
        std::vector<int32_t> got(n), grown;
        if (rank == 0) {
          CHECK_OK(send(engine, {1}, numbers(n, 5)));
          CHECK_OK(receive_any_size(engine, {1}, &grown));
          CHECK_LOCKED(grown == numbers(n, 7));
        } else {
          CHECK_OK(receive(engine, {0}, &got));
          CHECK_LOCKED(got == numbers(n, 5));
          CHECK_OK(send(engine, {0}, numbers(n, 7)));
        }
      }
    }));
  }
}

TEST_CASE("messages match in order within a tag, and tags do not wait for each other") {
  for (bool shared : {true, false}) {
    World world(2, settings_of_messages(shared));
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      constexpr int kMany = 300;
      std::vector<std::vector<int32_t>> data;
      std::vector<int64_t> handles(2 * kMany);
      for (int i = 0; i < 2 * kMany; ++i) data.push_back(numbers(i % 7 == 0 ? 5000 : 100, i));
      if (rank == 0) {
        for (int i = 0; i < 2 * kMany; ++i)
          CHECK_OK(start_send(engine, {1, i % 2}, data[static_cast<size_t>(i)], &handles[static_cast<size_t>(i)]));
      } else {
        std::vector<int32_t> got;
        for (int tag : {1, 0})
          for (int i = tag; i < 2 * kMany; i += 2) {
            CHECK_OK(receive_any_size(engine, {0, tag}, &got));
            CHECK_LOCKED(got == data[static_cast<size_t>(i)]);
          }
      }
      for (int64_t h : handles)
        if (h) CHECK_OK(finish(engine, h));
    }));
  }
}

TEST_CASE("messages cross each other and a collective that waits, between all pairs at once") {
  for (bool shared : {true, false}) {
    World world(4, settings_of_messages(shared));
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      std::vector<std::vector<int32_t>> out(4), in(4, std::vector<int32_t>(30000));
      std::vector<int64_t> handles;
      int64_t h = 0, late = 0;
      const std::vector<float> one{1};
      std::vector<float> sum(1);
      if (rank != 3) CHECK_OK(submit(engine, Op::kAllreduce, "late", one, &sum, {1}, &late));
      for (int peer = 0; peer < 4; ++peer) {
        const auto p = static_cast<size_t>(peer);
        CHECK_OK(start_receive(engine, {peer, 9}, &in[p], &h));
        handles.push_back(h);
        out[p] = numbers(30000, 10 * rank + peer);
        CHECK_OK(start_send(engine, {peer, 9}, out[p], &h));
        handles.push_back(h);
      }
      for (int64_t one_of : handles) CHECK_OK(finish(engine, one_of));
      for (int peer = 0; peer < 4; ++peer)
        CHECK_LOCKED(in[static_cast<size_t>(peer)] == numbers(30000, 10 * peer + rank));
      if (rank == 3) CHECK_OK(submit(engine, Op::kAllreduce, "late", one, &sum, {1}, &late));
      CHECK_OK(finish(engine, late));
      CHECK_LOCKED(sum[0] == 4);
    }));
  }
}

TEST_CASE("a message that does not fit is an error on both sides, with what was sent and what was wanted") {
  for (bool shared : {true, false})
    for (size_t n : {3, 9000}) {
      World world(2, settings_of_messages(shared));
      CHECK_OK(world.each([&](Engine& engine, int rank) {
        std::vector<float> wrong_type(n);
        std::vector<int32_t> wrong_size(n + 1), right(n);
        std::array<Status, 3> status;
        if (rank == 0) {
          for (Status& s : status) s = send(engine, {1}, numbers(n, 1));
        } else {
          status[0] = receive(engine, {0}, &wrong_type);
          status[1] = receive(engine, {0}, &wrong_size);
          status[2] = receive(engine, {0}, &right);
          CHECK_LOCKED(right == numbers(n, 1));
        }
        CHECK_LOCKED(status[0].code() == Code::kMismatch);
        CHECK_LOCKED(status[0].text().find(text_of("rank 0 sent int32[", n, "]")) != std::string::npos);
        CHECK_LOCKED(status[0].text().find(text_of("float32[", n, "]")) != std::string::npos);
        CHECK_LOCKED(status[1].code() == Code::kMismatch);
        CHECK_LOCKED(status[1].text().find(text_of("int32[", n + 1, "]")) != std::string::npos);
        CHECK_OK(status[2]);
      }));
    }
}

TEST_CASE("a rank sends to itself, before or after it receives, also more than is copied") {
  World world(2);
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    std::vector<int32_t> got(4), large(20 << 20), back(20 << 20);
    CHECK_OK(send(engine, {rank}, numbers(4, rank)));
    CHECK_OK(receive(engine, {rank}, &got));
    CHECK_LOCKED(got == numbers(4, rank));
    int64_t h = 0, sent = 0;
    CHECK_OK(start_receive(engine, {rank, 3}, &got, &h));
    CHECK_OK(send(engine, {rank, 3}, numbers(4, 100)));
    CHECK_OK(finish(engine, h));
    CHECK_LOCKED(got == numbers(4, 100));
    large[12345] = rank + 1;
    CHECK_OK(start_send(engine, {rank}, large, &sent));
    CHECK_LOCKED(!engine.poll(sent));
    CHECK_OK(receive(engine, {rank}, &back));
    CHECK_OK(finish(engine, sent));
    CHECK_LOCKED(back == large);
    std::vector<float> wrong(3);
    CHECK_OK(send(engine, {rank}, numbers(4, 1)));
    CHECK_LOCKED(receive(engine, {rank}, &wrong).code() == Code::kMismatch);
  }));
}

TEST_CASE("a receive from any rank takes each message once and says from whom") {
  for (bool shared : {true, false}) {
    World world(4, settings_of_messages(shared));
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      if (rank != 0) {
        CHECK_OK(send(engine, {0, 1}, numbers(3000, rank)));
        return;
      }
      std::vector<bool> seen(4);
      for (int i = 1; i < 4; ++i) {
        std::vector<int32_t> got;
        int source = -1;
        CHECK_OK(receive_any_size(engine, {-1, 1}, &got, &source));
        CHECK_LOCKED((source > 0 && !seen[static_cast<size_t>(source)]));
        CHECK_LOCKED(got == numbers(3000, source));
        seen[static_cast<size_t>(source)] = true;
      }
    }));
  }
}

TEST_CASE("messages of process sets are apart, and a set is removed while one waits") {
  World world(3);
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    int set = 0;
    CHECK_OK(engine.add_process_set({0, 2}, &set));
    int64_t h = 0;
    std::vector<int32_t> got(1), other(1);
    const auto ten = numbers(1, 10), many = numbers(9000, 1);
    if (rank == 0) {
      CHECK_OK(start_send(engine, {2, 0, 0}, ten, &h));
      CHECK_OK(send(engine, {2, 0, set}, numbers(1, 20)));
      CHECK_OK(finish(engine, h));
    } else if (rank == 2) {
      CHECK_OK(receive(engine, {0, 0, set}, &got));
      CHECK_OK(receive(engine, {0, 0, 0}, &other));
      CHECK_LOCKED((got[0] == 20 && other[0] == 10));
    } else {
      const Status status = send(engine, {0, 0, set}, numbers(1, 1));
      CHECK_LOCKED(status.code() == Code::kInvalidArgument);
      CHECK_LOCKED(send(engine, {7}, numbers(1, 1)).text().find("not one of the job's") != std::string::npos);
    }
    if (rank == 0) CHECK_OK(start_send(engine, {2, 5, set}, many, &h));
    CHECK_OK(engine.remove_process_set(set));
    // Nobody leaves before everybody has removed it.
    CHECK_OK(perform(engine, Op::kBarrier, "removed", got, &other, {}));
    if (rank == 0) {
      const Status ended = finish(engine, h);
      CHECK_LOCKED(ended.code() == Code::kAborted);
      CHECK_LOCKED(ended.text().find("removed") != std::string::npos);
    }
  }));
}

TEST_CASE("a message to or from a rank that shuts down ends with its name") {
  for (bool shared : {true, false}) {
    World world(2, settings_of_messages(shared));
    CHECK_OK(world.each([&](Engine& engine, int rank) {
      if (rank == 0) return;
      std::vector<int32_t> got(1);
      int64_t sent = 0;
      const auto many = numbers(9000, 1);
      CHECK_OK(start_send(engine, {0}, many, &sent));
      const Status received = receive(engine, {0}, &got), refused = finish(engine, sent);
      for (const Status& s : {received, refused}) {
        CHECK_LOCKED(s.code() == Code::kAborted);
        CHECK_LOCKED(s.culprit() == 0);
      }
      CHECK_LOCKED(send(engine, {0}, numbers(1, 1)).code() == Code::kAborted);
    }));
  }
}

TEST_CASE("messages go on while a rank has joined") {
  World world(2);
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    Submission join;
    join.op = Op::kJoin;
    int64_t h = 0;
    std::vector<int32_t> got(3);
    if (rank == 0) {
      CHECK_OK(engine.submit(join, &h));
      CHECK_OK(send(engine, {1}, numbers(3, 1)));
    } else {
      CHECK_OK(receive(engine, {0}, &got));
      CHECK_OK(engine.submit(join, &h));
    }
    CHECK_OK(finish(engine, h));
  }));
}

TEST_CASE("a message that nobody matches is fatal after the time that the stall check allows") {
  World world(2, {{"HOROVOD_STALL_CHECK_TIME_SECONDS", "0.2"}, {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0.6"}});
  CHECK_OK(world.each([&](Engine& engine, int rank) {
    std::vector<int32_t> got(1);
    const Status stalled = rank == 0 ? send(engine, {1, 4}, numbers(9000, 1)) : receive(engine, {0, 5}, &got);
    CHECK_LOCKED(stalled.code() == Code::kAborted);
    auto says = [&](const char* text) { return stalled.text().find(text) != std::string::npos; };
    const bool of_sender = says("send to rank 1 (tag 4) of rank 0") && says("rank 1 has not called recv() from rank 0");
    const bool of_receiver =
        says("recv from rank 0 (tag 5) of rank 1") && says("rank 0 has not called send() to rank 1");
    CHECK_LOCKED((of_sender || of_receiver));  // whose clock strikes first
  }));
}

}  // namespace
}  // namespace hc
