"""How texts that others wrote are shown."""

import pytest

from harness.metrics.formatting import redacted


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("postgresql://u:secret@h/db", "postgresql://u:***@h/db"),
        ("postgresql://h/db?user=u&password=secret&x=1", "postgresql://h/db?user=u&password=***&x=1"),
        ("https://h/?access_token=secret#key=secret", "https://h/?access_token=***#key=***"),
        ("https://secret@h/x and https://h/y", "https://***@h/x and https://h/y"),
        ("https://u:se@cret@h:1/x?step=3", "https://u:***@h:1/x?step=3"),
        ("file:///a/b@c", "file:///a/b@c"),
    ],
)
def test_what_may_be_a_secret_is_shown_in_no_part_of_an_address(address: str, shown: str) -> None:
    assert redacted(address) == shown
