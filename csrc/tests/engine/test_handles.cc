// Handles by themselves: what a handle finds, and when it is let go.
#include <doctest/doctest.h>

#include "engine/operation/operation.h"

namespace hc {

TEST_CASE("a handle is released at once where its operation has succeeded, and only there") {
  Handles handles;
  Operation* op = handles.acquire();
  REQUIRE(op);
  const int64_t pending = op->handle;
  CHECK_FALSE(handles.release_if_succeeded(pending));
  CHECK(handles.find(pending) == op);
  handles.finished(op);
  CHECK(handles.release_if_succeeded(pending));
  CHECK(handles.find(pending) == nullptr);
  CHECK_FALSE(handles.release_if_succeeded(pending));
  CHECK(handles.live() == 0);

  Operation* again = handles.acquire();  // the same place in the pool
  CHECK(again == op);
  CHECK_FALSE(handles.release_if_succeeded(pending));
  again->status = error(Code::kMismatch, "ranks differ");
  handles.finished(again);
  const int64_t failed = again->handle;
  CHECK_FALSE(handles.release_if_succeeded(failed));  // its words are still to be asked for
  CHECK(handles.find(failed) == again);
  handles.release(failed);
  CHECK(handles.live() == 0);

  for (int64_t unknown : {int64_t{-1}, int64_t{0}, int64_t{1}, failed + (int64_t{1} << 40)})
    CHECK_FALSE(handles.release_if_succeeded(unknown));
}

TEST_CASE("handles of two pools differ: one that is kept from a former life is unknown to the next") {
  Handles first, second;
  const int64_t old = first.acquire()->handle;
  Operation* op = second.acquire();
  CHECK(op->handle != old);
  second.finished(op);
  CHECK(second.find(old) == nullptr);
  CHECK_FALSE(second.release_if_succeeded(old));
}

TEST_CASE("a handle that was given back before its operation ended is recycled when that ends") {
  Handles handles;
  Operation* op = handles.acquire();
  const int64_t handle = op->handle;
  handles.release(handle);
  CHECK_FALSE(handles.release_if_succeeded(handle));
  CHECK(handles.live() == 1);
  handles.finished(op);
  CHECK_FALSE(handles.release_if_succeeded(handle));
  CHECK(handles.live() == 0);
}

}  // namespace hc
