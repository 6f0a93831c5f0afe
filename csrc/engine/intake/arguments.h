// Checks that one rank can make of a submission before anything is queued. Thread: any.
#pragma once

#include "base/status.h"
#include "engine/operation/members.h"
#include "engine/operation/submission.h"

namespace hc {

// me: this rank's world rank. InvalidArgument, with the operation's name and what to pass instead.
Status check_arguments(const Submission& s, const Members& set, int me);

}  // namespace hc
