#include "engine/watch/peer_watch.h"

namespace hc {

void PeerWatch::start() {
  const Config& config = context_.config;
  liveness_ =
      Liveness(context_.mesh->size(), {config.liveness_probe_s, config.liveness_warn_s, config.liveness_error_s});
}

Status PeerWatch::check(TimePoint now, std::vector<bool> waits) {
  const Mesh& mesh = *context_.mesh;
  for (int r = 0; r < mesh.size(); ++r) {
    const auto at = static_cast<size_t>(r);
    waits[at] = waits[at] && r != mesh.rank() && !link_.has_left(r);
  }
  for (const Liveness::Action& action : liveness_.tick(now, waits)) {
    switch (action.kind) {
      case Liveness::Action::kPing:
        Counters::add(context_.counters.pings);
        link_.begin(FrameKind::kPing);
        HC_TRY(link_.send(action.rank, true));
        break;
      case Liveness::Action::kWarn:
        context_.log.warning(mesh.describe(action.rank), " is not responding for ", static_cast<int>(action.silent_s),
                             " s (stopped? swapped out?); it counts as lost after ", context_.config.liveness_error_s,
                             " s");
        break;
      case Liveness::Action::kLost:
        return Status(Code::kPeerLost,
                      text_of(mesh.describe(action.rank), " has not responded for ", static_cast<int>(action.silent_s),
                              " s (stopped? swapped out? HOROCLONE_LIVENESS_ERROR_S or "
                              "HOROVOD_GLOO_TIMEOUT_SECONDS sets the limit)"),
                      action.rank);
    }
  }
  return Status::ok();
}

}  // namespace hc
