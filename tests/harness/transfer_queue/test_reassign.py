"""What a consumer hands over to another one is that one's: where it dies, it goes out again."""

from __future__ import annotations

from tests.support.queue_in_a_folder import Queue


async def test_rows_that_were_handed_over_go_out_again_where_their_new_consumer_dies() -> None:
    queue = Queue()
    await queue.service.create_partition("a", range(4))
    queue.put([0, 1, 2, 3])
    assert queue.get("train", consumer="lent")[1] == [0, 1]
    queue.service.reassign("train", [1], "other")
    queue.service.release("lent")
    assert queue.get("train", 1)[1] == [0]
    queue.service.release("other")
    assert queue.get("train", 1)[1] == [1]
