// The channel whose data goes through MPI, on a double of MPI's five functions: messages between two ranks of one
// process, small ones sent at once, large ones when they are received, as every MPI does it. The real libraries are
// in tests/core/test_mpi_data.py.
#include <doctest/doctest.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "net/message_channel.h"
#include "net/mpi_api.h"
#include "net/tcp_channel.h"

using namespace hc;

namespace {

constexpr size_t kEagerBytes = 4096;

struct Message {
  int64_t id;
  int from, to, tag;
  bool is_send, done = false;
  std::byte* data;
  size_t bytes;
  std::vector<std::byte> copy;  // of a small one
};

struct MpiDouble {
  std::list<Message> messages;
  int64_t next_id = 1;
  int fail_after = -1;  // calls of Isend until one fails

  Message* find(int64_t id) {
    auto at = std::find_if(messages.begin(), messages.end(), [&](const Message& m) { return m.id == id; });
    return at == messages.end() ? nullptr : &*at;
  }
  size_t receives_of(int rank) const {
    return std::count_if(messages.begin(), messages.end(),
                         [&](const Message& m) { return !m.is_send && m.to == rank; });
  }
  void add(Message m, MessageRequest* request) {
    m.id = next_id++;
    std::memcpy(request->handle, &m.id, sizeof(m.id));
    if (m.is_send && m.bytes <= kEagerBytes) {
      m.copy.assign(m.data, m.data + m.bytes);
      m.done = true;
    }
    messages.push_back(std::move(m));
    match();
  }
  // The oldest of each kind with the same ranks and tag.
  void match() {
    for (auto send = messages.begin(); send != messages.end();) {
      auto to = std::find_if(messages.begin(), messages.end(), [&](const Message& m) {
        return send->is_send && !m.is_send && !m.done && m.from == send->from && m.to == send->to && m.tag == send->tag;
      });
      if (to == messages.end() || (send->done && send->copy.empty() && send->bytes > 0)) {
        ++send;
        continue;
      }
      REQUIRE(send->bytes <= to->bytes);
      if (send->bytes > 0) std::memcpy(to->data, send->copy.empty() ? send->data : send->copy.data(), send->bytes);
      to->done = true;
      send->done = true;
      send->tag = -1;  // matched
      ++send;
    }
  }
};
MpiDouble* mpi = nullptr;

int64_t id_of(const MessageRequest& request) {
  int64_t id;
  std::memcpy(&id, request.handle, sizeof(id));
  return id;
}

// The communicator is the rank that calls.
int fake_send(const void* data, int bytes, intptr_t, int to, int tag, intptr_t me, MessageRequest* request) {
  if (mpi->fail_after == 0) return 13;
  if (mpi->fail_after > 0) --mpi->fail_after;
  auto* at = static_cast<std::byte*>(const_cast<void*>(data));
  mpi->add({0, static_cast<int>(me), to, tag, true, false, at, static_cast<size_t>(bytes), {}}, request);
  return 0;
}
int fake_receive(void* data, int bytes, intptr_t, int from, int tag, intptr_t me, MessageRequest* request) {
  auto* at = static_cast<std::byte*>(data);
  mpi->add({0, from, static_cast<int>(me), tag, false, false, at, static_cast<size_t>(bytes), {}}, request);
  return 0;
}
int fake_test(MessageRequest* request, int* flag, void*) {
  const int64_t id = id_of(*request);
  Message* m = id == 0 ? nullptr : mpi->find(id);
  *flag = !m || m->done;
  if (m && m->done) {
    if (!m->is_send || m->tag == -1) mpi->messages.remove_if([&](const Message& one) { return one.id == id; });
    *request = {};
  }
  return 0;
}
int fake_cancel(MessageRequest* request) {
  if (Message* m = mpi->find(id_of(*request)); m && !m->is_send) m->done = true, m->tag = -1;
  return 0;
}
int fake_text(int, char* text, int* length) {
  std::strcpy(text, "the network is down");
  *length = static_cast<int>(std::strlen(text));
  return 0;
}

struct Pair {
  Pair() {
    mpi = &mpi_double;
    int control[2], data[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, control) == 0);
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, data) == 0);
    for (int side = 0; side < 2; ++side) {
      tcp[side] = std::make_unique<TcpChannel>(1 - side, side == 0 ? "rank 1 (b)" : "rank 0 (a)", &traffic[side],
                                               TcpChannel::Sockets{Fd(control[side]), Fd(data[side]), -1, 0});
      auto api = std::make_shared<MpiApi>(MpiFunctions{fake_send, fake_receive, fake_test, fake_cancel, fake_text},
                                          MpiLink{"", side, 0, true});
      channel[side] = std::make_unique<MessageChannel>(1 - side, tcp[side].get(), api, &traffic[side], 5);
      REQUIRE(channel[side]->use(true).is_ok());
    }
  }
  bool until(const std::function<bool()>& condition) {
    for (int round = 0; round < 100000 && !condition(); ++round) {
      bool moved = false;
      for (int side = 0; side < 2; ++side) status[side] = channel[side]->progress(&moved);
    }
    return condition();
  }
  MpiDouble mpi_double;
  Traffic traffic[2];
  std::unique_ptr<TcpChannel> tcp[2];
  std::unique_ptr<MessageChannel> channel[2];
  Status status[2];
};

struct Segment {
  Segment(uint32_t batch, uint64_t offset, size_t bytes, int seed) : data(bytes) {
    for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<std::byte>(seed == 0 ? 0 : i * 7 + seed);
    transfer.tag = Tag{3, 0, batch, offset};
    transfer.data = data.data();
    transfer.bytes = bytes;
  }
  std::vector<std::byte> data;
  Transfer transfer;
};

}  // namespace

TEST_CASE("message channel: segments of every size arrive, whoever comes first") {
  for (int order = 0; order < 3; ++order) {
    CAPTURE(order);
    Pair pair;
    std::list<Segment> sent, received;
    const size_t sizes[] = {0, 1, 2047, 2048, 2049, 4096, 70000, 4u << 20, 5, 300000};
    for (uint32_t batch : {7u, 9u}) {
      uint64_t offset = 0;
      for (size_t bytes : sizes) {
        sent.emplace_back(batch, offset, bytes, static_cast<int>(batch + offset + 1));
        received.emplace_back(batch, offset++, bytes, 0);
      }
    }
    auto send_all = [&] {
      for (Segment& s : sent) pair.channel[0]->post_send(&s.transfer);
    };
    if (order == 0) send_all();
    if (order == 2) {  // the second stream's receives first
      send_all();
      pair.until([n = 0]() mutable { return ++n > 50; });
      std::rotate(received.begin(), std::next(received.begin(), std::size(sizes)), received.end());
    }
    for (Segment& r : received) pair.channel[1]->post_receive(&r.transfer);
    if (order == 1) send_all();
    REQUIRE(pair.until([&] {
      const auto done = [](const Segment& s) { return s.transfer.done; };
      return std::all_of(sent.begin(), sent.end(), done) && std::all_of(received.begin(), received.end(), done);
    }));
    for (const Segment& r : received) {
      auto same = std::find_if(sent.begin(), sent.end(), [&](const Segment& s) {
        return s.transfer.tag.batch == r.transfer.tag.batch && s.transfer.tag.offset == r.transfer.tag.offset;
      });
      CHECK(r.data == same->data);
    }
    CHECK(pair.until([&] { return pair.channel[0]->flushed() && !pair.channel[1]->under_way(); }));
    CHECK(pair.status[0].is_ok());
    CHECK(pair.status[1].is_ok());
    CHECK(pair.traffic[0].segments_sent.value() == 2 * std::size(sizes));
    CHECK(pair.traffic[1].segments_received.value() == 2 * std::size(sizes));
  }
}

TEST_CASE("message channel: the backend changes between operations") {
  Pair pair;
  for (int round = 0; round < 6; ++round) {
    const bool on = round % 2 == 0;
    for (auto& channel : pair.channel) REQUIRE(channel->use(on).is_ok());
    const uint64_t before = pair.traffic[0].syscalls.value();
    Segment out(round, 0, 50000, round + 1), in(round, 0, 50000, 0);
    pair.channel[1]->post_receive(&in.transfer);
    pair.channel[0]->post_send(&out.transfer);
    CHECK(pair.channel[1]->under_way() == on);
    REQUIRE(pair.until([&] { return in.transfer.done && out.transfer.done; }));
    CHECK(in.data == out.data);
    if (!on) CHECK(pair.traffic[0].syscalls.value() > before);
  }
}

TEST_CASE("message channel: what is withdrawn is not written to, and the channel says that it cannot go on") {
  Pair pair;
  Segment small(1, 0, 10, 0), large(2, 0, 100000, 0);
  pair.channel[1]->post_receive(&small.transfer);
  pair.channel[1]->forget(&small.transfer);
  Segment sent(1, 0, 10, 5), kept(1, 0, 10, 0);
  pair.channel[0]->post_send(&sent.transfer);
  pair.channel[1]->post_receive(&kept.transfer);
  REQUIRE(pair.until([&] { return kept.transfer.done; }));
  CHECK(small.data == std::vector<std::byte>(10));
  CHECK(pair.status[1].is_ok());  // nothing of it had moved

  // Announced, and the payload not there: like a peer that died in between.
  SegmentHeader header(large.transfer.tag, 100000);
  MessageRequest request;
  REQUIRE(fake_send(&header, sizeof(header), 0, 1, 5 % 3 * 10000, 0, &request) == 0);
  pair.channel[1]->post_receive(&large.transfer);
  pair.until([n = 0]() mutable { return ++n > 100; });
  CHECK(!large.transfer.done);
  pair.channel[1]->forget(&large.transfer);
  bool moved = false;
  const Status status = pair.channel[1]->progress(&moved);
  CHECK(status.code() == Code::kAborted);
  CHECK(status.culprit() == 0);
}

TEST_CASE("message channel: a stream out of step, a damaged announcement and MPI's own error are told") {
  SUBCASE("out of step") {
    Pair pair;
    Segment sent(1, 4, 10, 5), received(1, 5, 10, 0);
    pair.channel[1]->post_receive(&received.transfer);
    pair.channel[0]->post_send(&sent.transfer);
    pair.until([&] { return !pair.status[1].is_ok(); });
    CHECK(pair.status[1].text().find("data out of step") != std::string::npos);
  }
  SUBCASE("damaged") {
    Pair pair;
    SegmentHeader header(Tag{}, 0xffffffff);
    MessageRequest request;
    REQUIRE(fake_send(&header, sizeof(header), 0, 1, 5 % 3 * 10000, 0, &request) == 0);
    pair.until([&] { return !pair.status[1].is_ok(); });
    CHECK(pair.status[1].text().find("a damaged data header") != std::string::npos);
  }
  SUBCASE("MPI's own") {
    Pair pair;
    pair.mpi_double.fail_after = 0;
    Segment sent(1, 0, 10, 5);
    pair.channel[0]->post_send(&sent.transfer);
    bool moved = false;
    const Status status = pair.channel[0]->progress(&moved);
    CHECK(status.text().find("MPI_Isend: the network is down") != std::string::npos);
    CHECK(status.culprit() == 1);
  }
}

TEST_CASE("message channel: a peer that dies is told by control, and closing leaves nothing with MPI") {
  Pair pair;
  Segment received(1, 0, 100000, 0);
  pair.channel[1]->post_receive(&received.transfer);
  pair.tcp[0]->close();
  REQUIRE(pair.until([&] { return !pair.status[1].is_ok(); }));
  CHECK(pair.status[1].code() == Code::kPeerLost);
  pair.channel[1]->forget(&received.transfer);
  pair.channel[1]->close();
  CHECK(pair.mpi_double.receives_of(1) == 0);
}
