#include "net/handshake.h"

#include <poll.h>

#include <algorithm>
#include <cstring>

#include "base/build.h"
#include "base/wire.h"
#include "net/socket.h"

namespace hc {
namespace {

constexpr uint32_t kHelloMagic = 0x4e4c4348;  // "HCLN"
constexpr size_t kMagicBytes = 4;
constexpr size_t kHelloStart = kMagicBytes + kBuildBytes;  // all that another version must share
constexpr std::string_view kContext = "horoclone handshake";

}  // namespace

const char* text_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::kWelcome:
      return "welcome";
    case Verdict::kBadProof:
      return "the job secret or the job id differs";
    case Verdict::kWrongGeneration:
      return "it belongs to another generation of the job";
    case Verdict::kNotThisRank:
      return "another rank answers at this address";
    case Verdict::kUnexpectedRank:
      return "no connection from that rank is expected";
    case Verdict::kDuplicate:
      return "that rank is connected already";
    case Verdict::kBusy:
      return "it is about to connect by itself";
  }
  return "unknown verdict";
}

Handshake::Handshake(const Credentials* credentials, const Claim& claim, bool connecting)
    : credentials_(credentials), claim_(claim), connecting_(connecting) {
  if (Status random = random_bytes(own_nonce_); !random.is_ok()) fail(random.code(), random.text(), false);
}

Handshake Handshake::connect(const Credentials* credentials, const Claim& claim) {
  Handshake one(credentials, claim, true);
  one.queue_hello();
  return one;
}

Handshake Handshake::accept(const Credentials* credentials, uint64_t generation, Judge judge) {
  Claim claim;
  claim.generation = generation;
  Handshake one(credentials, claim, false);
  one.judge_ = std::move(judge);
  return one;
}

void Handshake::queue(const void* bytes, size_t count) {
  if (out_sent_ == out_bytes_) out_sent_ = out_bytes_ = 0;
  std::memcpy(out_.data() + out_bytes_, bytes, count);
  out_bytes_ += count;
}

// hello: magic, name of the build, purpose, number, count, attempt, nonce. The same both ways.
void Handshake::queue_hello() {
  Writer hello;
  hello.put(kHelloMagic);
  char build[kBuildBytes] = {};
  build_name().copy(build, sizeof(build));
  hello.put_raw(build, sizeof(build));
  hello.put(claim_.purpose);
  for (const uint8_t one : {claim_.number, claim_.count, claim_.attempt}) hello.put(one);
  hello.put_raw(own_nonce_.data(), own_nonce_.size());
  queue(hello.bytes().data(), hello.size());
}

// The role byte makes the two directions differ, so that a proof cannot be sent back as the answer to itself.
Digest Handshake::code(bool by_connector) const {
  const auto& connector = connecting_ ? own_nonce_ : peer_nonce_;
  const auto& acceptor = connecting_ ? peer_nonce_ : own_nonce_;
  Writer facts;
  facts.put(static_cast<uint8_t>(by_connector ? 1 : 2));
  facts.put_text(build_name());
  facts.put(claim_.purpose);
  for (const uint8_t one : {claim_.number, claim_.count, claim_.attempt}) facts.put(one);
  facts.put(claim_.generation);
  facts.put(claim_.from);
  facts.put(claim_.to);
  facts.put(static_cast<uint64_t>(credentials_->job.size()));
  return hmac_sha256(bytes_of(credentials_->secret),
                     {bytes_of(kContext), facts.bytes(), bytes_of(credentials_->job), connector, acceptor});
}

void Handshake::allow_proof() {
  if (stage_ != Stage::kHeld) return;
  stage_ = Stage::kProof;
  Writer proof;
  proof.put(claim_.from);
  proof.put(claim_.to);
  proof.put(claim_.generation);
  Digest mac = code(true);
  proof.put_raw(mac.data(), mac.size());
  queue(proof.bytes().data(), proof.size());
}

Handshake::State Handshake::fail(Code code, std::string text, bool refused) {
  if (state_ == State::kFailed) return state_;
  status_ = Status(code, std::move(text));
  refused_ = refused;
  return state_ = State::kFailed;
}

// Looked at as soon as it is there: a stranger's first four bytes end the conversation.
void Handshake::take_magic() {
  uint32_t magic = 0;
  std::memcpy(&magic, in_.data(), sizeof(magic));
  magic_checked_ = true;
  if (magic != kHelloMagic) fail(Code::kInvalidArgument, "the other side does not speak horoclone's protocol", false);
}

void Handshake::take_build() {
  build_checked_ = true;
  const std::string_view build(reinterpret_cast<const char*>(in_.data()) + kMagicBytes, kBuildBytes);
  if (build.substr(0, std::min(build.find('\0'), kBuildBytes)) == build_name()) return;
  if (!connecting_) queue_hello();  // so that it can name both builds, too
  fail(Code::kUnsupported, other_build(build), true);
}

void Handshake::take_hello() {
  const auto purpose = static_cast<Purpose>(in_[kHelloStart]);
  const uint8_t number = in_[kHelloStart + 1], count = in_[kHelloStart + 2], attempt = in_[kHelloStart + 3];
  std::memcpy(peer_nonce_.data(), in_.data() + kHelloBytes - peer_nonce_.size(), peer_nonce_.size());
  if (connecting_) {
    const bool same = number == claim_.number && count == claim_.count && attempt == claim_.attempt;
    if (purpose != claim_.purpose || !same || peer_nonce_ == own_nonce_) {
      fail(Code::kInvalidArgument, "the other side sent this rank's own hello back", false);
      return;
    }
    stage_ = Stage::kHeld;
    return;
  }
  if (purpose < Purpose::kLocal || purpose > Purpose::kParallel) {
    fail(Code::kInvalidArgument, "a hello with an unknown purpose", false);
    return;
  }
  claim_.purpose = purpose;
  claim_.number = number;
  claim_.count = count;
  claim_.attempt = attempt;
  queue_hello();
  stage_ = Stage::kProof;
}

void Handshake::take_proof() {
  Reader proof({in_.data(), kProofBytes});
  const uint64_t own_generation = claim_.generation;
  claim_.from = proof.get<int32_t>();
  claim_.to = proof.get<int32_t>();
  claim_.generation = proof.get<uint64_t>();
  Digest mac{};
  proof.take(mac.data(), mac.size());
  if (!equal_in_constant_time(mac, code(true))) {
    verdict_ = Verdict::kBadProof;
  } else if (claim_.generation != own_generation) {
    verdict_ = Verdict::kWrongGeneration;
  } else {
    verdict_ = judge_(claim_);
  }
  Writer answer;
  answer.put(verdict_);
  answer.put_raw("\0\0\0", 3);
  Digest own{};
  if (verdict_ != Verdict::kBadProof) own = code(false);
  answer.put_raw(own.data(), own.size());
  queue(answer.bytes().data(), answer.size());
  stage_ = Stage::kDone;
  if (verdict_ == Verdict::kWelcome) return;
  // Only a proven claim is worth naming; anything else may be anybody's invention.
  std::string who = verdict_ == Verdict::kBadProof ? "a peer" : hc::text_of("rank ", claim_.from);
  fail(Code::kInvalidArgument, hc::text_of("refused ", who, ": ", text_of(verdict_)), true);
}

void Handshake::take_verdict() {
  const auto verdict = verdict_ = static_cast<Verdict>(in_[0]);
  const bool proven = equal_in_constant_time({in_.data() + kVerdictBytes - 32, 32}, code(false));
  stage_ = Stage::kDone;
  if (verdict == Verdict::kWelcome && proven) {
    state_ = State::kDone;
  } else if (verdict == Verdict::kWelcome) {
    fail(Code::kInvalidArgument, "the other side could not prove that it knows the job secret", true);
  } else {
    // Another rank at this address: the right one may still answer at the next. Busy: this will pass.
    fail(Code::kInvalidArgument, hc::text_of("refused: ", text_of(verdict)),
         verdict != Verdict::kNotThisRank && verdict != Verdict::kBusy);
  }
}

size_t Handshake::wanted() const {
  if (stage_ == Stage::kHello) return !magic_checked_ ? kMagicBytes : !build_checked_ ? kHelloStart : kHelloBytes;
  if (stage_ == Stage::kProof) return connecting_ ? kVerdictBytes : kProofBytes;
  return 0;
}

bool Handshake::flush(int fd) {
  while (out_sent_ < out_bytes_) {
    iovec part{out_.data() + out_sent_, out_bytes_ - out_sent_};
    IoResult result = send_parts(fd, {&part, 1});
    if (result.what == Io::kWouldBlock) return false;
    if (result.what != Io::kMoved) {
      fail(Code::kPeerLost, std::strerror(result.error_number), false);
      return false;
    }
    out_sent_ += result.bytes;
  }
  return true;
}

// Never reads beyond the frame: what follows belongs to the channel.
bool Handshake::fill(int fd) {
  while (in_bytes_ < wanted()) {
    iovec part{in_.data() + in_bytes_, wanted() - in_bytes_};
    IoResult result = receive_parts(fd, {&part, 1});
    if (result.what == Io::kWouldBlock) return false;
    if (result.what == Io::kEnded) {
      fail(Code::kPeerLost, "closed the connection during the handshake", false);
      return false;
    }
    if (result.what == Io::kFailed) {
      fail(Code::kPeerLost, std::strerror(result.error_number), false);
      return false;
    }
    in_bytes_ += result.bytes;
  }
  return true;
}

Handshake::State Handshake::step(int fd) {
  while (state_ == State::kPending) {
    if (!flush(fd)) break;
    if (stage_ == Stage::kDone) {
      state_ = State::kDone;  // accepting side: the welcome has left
      break;
    }
    if (stage_ == Stage::kHeld || !fill(fd)) break;
    if (!magic_checked_ || !build_checked_) {
      magic_checked_ ? take_build() : take_magic();
      continue;
    }
    in_bytes_ = 0;
    if (stage_ == Stage::kHello) {
      take_hello();
    } else if (connecting_) {
      take_verdict();
    } else {
      take_proof();
    }
  }
  if (state_ == State::kFailed && refused_ && !connecting_) flush(fd);  // tell it why, as far as that goes at once
  return state_;
}

short Handshake::events() const {
  if (out_sent_ < out_bytes_) return POLLOUT;
  return stage_ == Stage::kHeld ? 0 : POLLIN;
}

}  // namespace hc
