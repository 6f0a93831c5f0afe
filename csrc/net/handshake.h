// Mutual authentication of one connection, before anything else is read from it: both sides prove that they know the
// job secret, over fresh nonces, the job id, the generation, both ranks and the connection's purpose. Non-blocking,
// with fixed-size frames only, so that a stranger costs no more memory than this object. The frames are hello, hello,
// proof, verdict.
//
// Thread: the one that connects the mesh. Owner: the bootstrap.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "base/sha256.h"
#include "base/status.h"

namespace hc {

// What a connection is for.
enum class Purpose : uint8_t { kLocal = 1, kControl = 2, kData = 3, kParallel = 4 };

// Why the accepting side turns a connection down. Except for kBadProof, the other side is told only after its proof was
// right.
enum class Verdict : uint8_t {
  kWelcome,
  kBadProof,
  kWrongGeneration,
  kNotThisRank,
  kUnexpectedRank,
  kDuplicate,
  kBusy
};
const char* text_of(Verdict verdict);

// Who connects to whom. `from` is the connecting rank.
struct Claim {
  int32_t from = -1;
  int32_t to = -1;
  uint64_t generation = 0;
  Purpose purpose = Purpose::kControl;
  // Of several connections for data (kParallel): which of how many.
  uint8_t number = 0, count = 0;
  // 0: at the start. Else the how-manieth attempt to open several; 1 also for one that takes a lost one's place.
  uint8_t attempt = 0;
};

struct Credentials {
  std::string secret;
  std::string job;
};

class Handshake {
 public:
  enum class State : uint8_t { kPending, kDone, kFailed };
  using Judge = std::function<Verdict(const Claim&)>;

  // The connecting side. It sends its proof only after allow_proof(), so that of several addresses tried at once only
  // one goes on.
  static Handshake connect(const Credentials* credentials, const Claim& claim);
  // The accepting side: `judge` is asked about a proven claim and accepts the connection with kWelcome.
  static Handshake accept(const Credentials* credentials, uint64_t generation, Judge judge);
  void judged_by(Judge judge) { judge_ = std::move(judge); }

  // Goes on as far as possible without waiting.
  State step(int fd);
  // What to wait for: POLLIN or POLLOUT, 0 while held back by allow_proof.
  short events() const;
  bool ready_to_prove() const { return stage_ == Stage::kHeld; }
  void allow_proof();
  // The other side has said no, so that it took no notice of this connection.
  bool turned_away() const { return connecting_ && verdict_ != Verdict::kWelcome; }
  bool proof_sent() const { return connecting_ && stage_ >= Stage::kProof; }

  bool is_busy() const { return verdict_ == Verdict::kBusy; }
  bool said_hello() const { return stage_ != Stage::kHello; }

  // kFailed: the reason, as text for the log. `refused` when the other side said so or speaks another protocol, so that
  // another attempt is unlikely to help.
  const Status& status() const { return status_; }
  bool refused() const { return refused_; }

 private:
  enum class Stage : uint8_t { kHello, kHeld, kProof, kDone };
  static constexpr size_t kHelloBytes = 68, kProofBytes = 48, kVerdictBytes = 36;

  Handshake(const Credentials* credentials, const Claim& claim, bool connecting);
  void queue_hello();
  Digest code(bool by_connector) const;
  void take_magic();
  void take_build();
  void take_hello();
  void take_proof();
  void take_verdict();
  void queue(const void* bytes, size_t count);
  State fail(Code code, std::string text, bool refused);
  bool flush(int fd);
  bool fill(int fd);
  size_t wanted() const;

  const Credentials* credentials_;  // the bootstrap's
  Judge judge_;
  Claim claim_;
  bool connecting_;
  bool refused_ = false;
  bool magic_checked_ = false, build_checked_ = false;
  Stage stage_ = Stage::kHello;
  State state_ = State::kPending;
  Verdict verdict_ = Verdict::kWelcome;
  std::array<uint8_t, 32> own_nonce_{}, peer_nonce_{};
  std::array<uint8_t, 128> out_{};
  std::array<uint8_t, 72> in_{};
  size_t out_bytes_ = 0, out_sent_ = 0, in_bytes_ = 0;
  Status status_;
};

}  // namespace hc
