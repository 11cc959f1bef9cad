"""Config of the weights that a run sends to readers while it trains."""

import dataclasses
from pathlib import Path
from typing import Literal

from jtrain.errors import FileError, UserError

TCP = "tcp://"
_LEAST_TOKEN_BYTES = 16


@dataclasses.dataclass(frozen=True)
class WeightStreamSpec:
    """Weights sent to readers while a run trains, by the names of Hugging Face files.

    to: a folder, in the workdir if it is relative, that gets a model directory `step-00000100` each time, and
      then its name in the file `latest`; or tcp://HOST:PORT, where a `jtrain.hf.weight_link.WeightReader`
      listens.
    every_steps: steps between two sets of weights; those of the last step are sent as well.
    keep_last: folders that are kept; the disk holds one more while that is written.
    dtype: of the weights; None for that of an export.
    only_adapter: sends A and B of the adapter as peft has them; False merges them into the model.
    token_file: file with the secret by which run and reader know each other, for tcp://.
    """

    to: str = "weights"
    every_steps: int = 100
    keep_last: int = 2
    dtype: Literal["float32", "bfloat16"] | None = None
    only_adapter: bool = False
    token_file: str | None = None

    def __post_init__(self) -> None:
        for name in ("every_steps", "keep_last"):
            if (value := getattr(self, name)) < 1:
                raise UserError(f"weight_stream.{name}={value} must be at least 1. Set weight_stream.{name}.")
        if "://" not in self.to:
            if not self.to or self.token_file is not None:
                raise UserError(
                    f"weight_stream.to={self.to!r} with weight_stream.token_file={self.token_file!r}: "
                    "weights go to a folder, which needs no token, or to tcp://HOST:PORT with one. Set "
                    "weight_stream.to=weights and weight_stream.token_file=None."
                )
            return
        if self.address is None or self.token_file is None:
            raise UserError(
                f"weight_stream.to={self.to!r} with weight_stream.token_file={self.token_file!r}: a reader "
                "is tcp://HOST:PORT with a port from 1 to 65535, and knows the run by a token that both "
                "read from a file. Set both, or weight_stream.to=weights, a folder in the workdir."
            )

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port of a reader; None for a folder, and where there is none in `to`."""
        host, _, port = self.to.removeprefix(TCP).rpartition(":")
        is_port = port.isdecimal() and 0 < int(port) < 1 << 16
        return (host.strip("[]"), int(port)) if self.to.startswith(TCP) and host and is_port else None


def read_token(path: str) -> bytes:
    """Reads the secret of a run and its reader.

    Raises:
      FileError: the file cannot be read.
      UserError: it is too short for a secret.
    """
    make = f"Make one, and copy it to the other side: `head -c 32 /dev/urandom | base64 > {path}`."
    try:
        token = Path(path).read_bytes().strip()
    except OSError as error:
        raise FileError(
            f"weight_stream.token_file={path} cannot be read ({error.strerror}). {make}"
        ) from error
    if len(token) < _LEAST_TOKEN_BYTES:
        raise UserError(
            f"weight_stream.token_file={path} has {len(token)} bytes, and a secret {_LEAST_TOKEN_BYTES} or "
            f"more. {make}"
        )
    return token
