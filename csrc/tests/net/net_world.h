// A mesh of N ranks as threads of one process, for the tests of net/: listens, swaps the endpoints, connects.
#pragma once

#include <doctest/doctest.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "net/mesh.h"

namespace hc::net_tests {

// alarm() in a forked child: one that hangs dies, and its parent goes on to say so.
inline constexpr unsigned kChildSeconds = 120;

inline MeshOptions small_options(bool shared_memory) {
  MeshOptions options;
  options.shared_memory = shared_memory;
  options.arena_bytes = kMinArenaBytes;
  options.interfaces = "lo";
  options.socket_buffer_bytes = 4096;
  return options;
}

inline MeshMembers members_of(const std::vector<std::string>& endpoints, int rank) {
  MeshMembers members;
  members.rank = rank;
  members.endpoints = endpoints;
  members.secret = "sixteen bytes or more";
  members.job = "net tests";
  members.generation = 7;
  members.timeout_s = 20;
  return members;
}

class MeshWorld {
 public:
  // Everybody listens; connect() is a second step, so that a test can get in between.
  explicit MeshWorld(const std::vector<MeshOptions>& options) {
    for (const MeshOptions& one : options) {
      auto mesh = Mesh::listen(one);
      REQUIRE_MESSAGE(mesh.is_ok(), mesh.status().text());
      meshes.push_back(mesh.take());
      endpoints.push_back(meshes.back()->endpoint());
    }
  }
  MeshWorld(int size, bool shared_memory) : MeshWorld(std::vector(size, small_options(shared_memory))) {}

  int size() const { return static_cast<int>(meshes.size()); }

  std::vector<Status> connect(const std::function<void(MeshMembers&)>& change = {}) {
    std::vector<Status> outcomes(size());
    each([&](Mesh& mesh, int rank) {
      MeshMembers members = members_of(endpoints, rank);
      if (change) change(members);
      outcomes[rank] = mesh.connect(members);
    });
    return outcomes;
  }
  void must_connect() {
    auto outcomes = connect();
    for (const Status& s : outcomes) REQUIRE_MESSAGE(s.is_ok(), s.text());
  }
  // Runs body on one thread per rank. A REQUIRE that fails ends its rank's body only; the test has failed by then.
  template <class Body>
  void each(const Body& body) {
    std::vector<std::thread> threads;
    for (int r = 0; r < size(); ++r) {
      threads.emplace_back([&, r] {
        try {
          body(*meshes[r], r);
        } catch (...) {
        }
      });
    }
    for (auto& t : threads) t.join();
  }

  std::vector<std::unique_ptr<Mesh>> meshes;
  std::vector<std::string> endpoints;
};

// The next control frame from `rank`, sleeping in poll() between looks. Empty when there is none in time or the rank is
// lost.
inline std::vector<uint8_t> next_frame(Mesh& mesh, int rank, std::vector<Loss>* losses, double timeout_s = 20) {
  std::vector<uint8_t> frame;
  for (Deadline deadline = Deadline::in(timeout_s); !deadline.passed();) {
    if (mesh.channel(rank).receive(&frame)) return frame;
    for (const Loss& loss : *losses) {
      if (loss.rank == rank) return {};
    }
    bool moved = false;
    if (!mesh.poll(100, &moved, losses).is_ok()) return {};
  }
  return {};
}

}  // namespace hc::net_tests
