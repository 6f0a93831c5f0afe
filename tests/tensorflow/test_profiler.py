"""Our ops in TensorFlow's profiler: spans around eager ones, nodes by their names in graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from world import later, ranks

tf = later("tensorflow")
hvd = later("horoclone.tensorflow")


def events_in(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Name and stated facts of every event in the profile that lies in `folder`."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    (file,) = folder.rglob("*.xplane.pb")
    space = xplane_pb2.XSpace.FromString(file.read_bytes())
    found = []
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                facts = {
                    plane.stat_metadata[stat.metadata_id].name: stat.str_value
                    or plane.stat_metadata[stat.ref_value].name
                    for stat in event.stats
                }
                found.append((plane.event_metadata[event.metadata_id].name, facts))
    return found


@ranks(2)
def test_eager_ops_have_spans_and_ops_in_graphs_their_names(tmp_path: Path) -> None:
    graph = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name="in_graph"))
    hvd.allreduce(tf.ones(3), name="before")
    assert graph(tf.ones(3)).numpy().tolist() == [2.0] * 3
    folder = tmp_path / str(hvd.rank())
    tf.profiler.experimental.start(str(folder))
    hvd.allreduce(tf.ones(3), name="eager", op=hvd.Sum)
    hvd.allgather(tf.ones((1, 2)), name="rows")
    for _ in range(2):  # the last one's end may come after the profiler's
        graph(tf.ones(3))
    tf.profiler.experimental.stop()
    hvd.allreduce(tf.ones(3), name="after")
    events = events_in(folder)
    ours = {(name, facts.get("tensor", "")) for name, facts in events if name.startswith("horoclone.")}
    assert ours == {("horoclone.allreduce", "eager"), ("horoclone.allgather", "rows")}, ours
    in_graph = {name for name, facts in events if facts.get("name") == "in_graph"}
    assert in_graph >= {"ExecutorState::ProcessAsync::Start", "ExecutorState::ProcessAsync::Done"}, in_graph
