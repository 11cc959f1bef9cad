"""Exit codes: the user's errors, the world's, and the table in the docs."""

import errno
from pathlib import Path

import pytest

from jtrain.cli.run import run
from jtrain.errors import AwayError, UserError
from jtrain.runtime import exit_codes
from jtrain.runtime.atomic_io import cannot_write
from jtrain.runtime.stores import store_errors
from jtrain.supervise.restarts import AWAY_S, LONGEST_BACKOFF_S, NEVER_RESTARTED, Restarts
from jtrain.supervise.spec import SuperviseSpec

ROOT = Path(__file__).parents[2]


def code_of(error: Exception) -> int:
    def fails() -> int:
        raise error

    return run(fails)


def store_error(error: Exception) -> Exception:
    with pytest.raises(UserError) as caught, store_errors("gs://bucket/run"):
        raise error
    return caught.value


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EIO])
def test_what_is_away_is_not_the_users_to_mend(number: int) -> None:
    """A full disk, a quota, NFS away: 77, by our own message and by the system's."""
    assert code_of(cannot_write(Path("run"), OSError(number, "away"))) == exit_codes.AWAY
    assert code_of(OSError(number, "away", "run/config.txt")) == exit_codes.AWAY


def test_what_the_user_can_mend_stays_2() -> None:
    """No permission, no such folder, a store that answers no."""
    for number in (errno.EACCES, errno.ENOENT, errno.EROFS):
        assert code_of(cannot_write(Path("run"), OSError(number, "no"))) == exit_codes.REFUSED
        assert code_of(OSError(number, "no", "run/config.txt")) == exit_codes.REFUSED
    assert code_of(store_error(PermissionError("403: no access"))) == exit_codes.REFUSED
    assert code_of(UserError("num_steps=0")) == exit_codes.REFUSED


def test_a_store_that_does_not_answer_is_away() -> None:
    for error in (
        TimeoutError(),
        ConnectionRefusedError(111, "refused"),
        ValueError("UNAVAILABLE: no route"),
    ):
        assert isinstance(store_error(error), AwayError)


def test_what_is_away_is_tried_for_an_hour_and_is_no_failure() -> None:
    """Longer pauses up to a minute; the restarts of a run that crashes are untouched; progress begins anew."""
    assert exit_codes.AWAY not in NEVER_RESTARTED
    restarts, spec = Restarts(), SuperviseSpec()
    pauses = [restarts.away_pause_s(spec, now_s=now_s) for now_s in (0.0, 1.0, 3.0, 60.0, 3000.0, AWAY_S)]
    assert all(pause is not None and pause <= LONGEST_BACKOFF_S for pause in pauses), pauses
    assert restarts.failures == 0
    assert restarts.away_pause_s(spec, now_s=AWAY_S + 1) is None
    restarts.note_start(5)
    assert restarts.away_pause_s(spec, now_s=2 * AWAY_S) is not None


def test_the_docs_table_is_the_codes() -> None:
    assert exit_codes.table() in (ROOT / "docs" / "clusters.md").read_text()
