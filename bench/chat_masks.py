"""Masks of chats, by every chat template of TRL, against a scripted model that samples each turn.

    pip download trl==1.16.0 --no-deps -d T && python -m jtrain.bench chat_masks --trl T/trl-1.16.0-*.whl

200 conversations (two turns; a system message; reasoning; tools and a call), each template with a small
tokenizer of its special tokens. Every conversation must be learned exactly as it is sampled, or refused with
the reason. The rows of the blocks `{% generation %}`, by which TRL's training templates say what is trained,
count turns whose block is not what is sampled. The templates are TRL's and not in this repository.
"""

import tempfile
import zipfile
from collections import Counter
from pathlib import Path

from bench.data_parts.chats import KINDS, conversations
from bench.data_parts.sampled_masks import SampledMasks
from jtrain.bench import Options, Row, option, row
from jtrain.errors import UserError

OPTIONS = (
    option("--trl", type=Path, metavar="WHEEL", help="wheel of trl, which has the templates"),
    option(
        "--conversations", type=int, default=200, metavar="N", help="conversations (default: %(default)s)"
    ),
    option("--only", metavar="NAME", help="templates whose names begin so"),
)

MUST_MEET = True

STOPS = {
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
    "deepseek": ("<｜end▁of▁sentence｜>",),
    "diffusion_gemma": ("<turn|>", "<|tool_response>"),
    "gemma4": ("<turn|>", "<|tool_response>"),
    "gemma": ("<end_of_turn>",),
    "glm4moe": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|call|>"),
    "idefics3": ("<end_of_utterance>",),
    "lfm2": ("<|im_end|>",),
    "llama3": ("<|eot_id|>", "<|eom_id|>"),
    "llava_next": ("</s>",),
    "muse_glimmer": ("<|eot|>", "<|eom|>"),
    "nemotron": ("<|im_end|>",),
    "phi3": ("<|endoftext|>", "<|end|>"),
    "qwen": ("<|im_end|>",),
    "smolvlm": ("<end_of_utterance>",),
}
"""Stop tokens of the models, by the beginning of a template's name; the first is the end token."""


def run(args: Options) -> list[Row]:
    """Returns the rows of all templates."""
    if args.trl is None:
        raise UserError(
            "chat_masks needs the wheel of trl: pip download trl==1.16.0 --no-deps, then --trl FILE."
        )
    chats, rows, totals = conversations(args.conversations), [], Counter[str]()
    for name, template in _templates(args.trl, args.only or "").items():
        stops = next(stops for prefix, stops in STOPS.items() if name.startswith(prefix))
        for rule in ("refuse", "split"):
            with tempfile.TemporaryDirectory() as folder:
                masks = SampledMasks(Path(folder), template, stops, on_rewritten_turn=rule)
                counts = masks.compare(chats)
                for kind in KINDS:
                    total = sum(count for (other, _), count in counts.items() if other == kind)
                    for verdict in ("equal", "split equal", "refused", "different"):
                        totals[f"{rule}: {verdict}"] += counts[kind, verdict]
                        if counts[kind, verdict]:
                            reason = _in_short(masks.reasons.get(kind, "")) if verdict == "refused" else ""
                            label = f"{name}, {rule}, {kind}: {verdict}{reason}"
                            bar = "<= 0" if verdict == "different" else None
                            rows.append(row(label, counts[kind, verdict], f"of {total}", bar=bar))
                if rule == "split":
                    continue
                blocks = masks.template_blocks(chats)
                for verdict in sorted(set(blocks) - {"turns"}):
                    if blocks[verdict]:
                        rows.append(
                            row(
                                f"{name}, its blocks: {verdict}",
                                blocks[verdict],
                                f"of {blocks['turns']} turns",
                            )
                        )
    totals.setdefault("refuse: different", 0)
    ends = [
        row(f"all, {label}", count, "conversations", bar="<= 0" if "different" in label else None)
        for label, count in sorted(totals.items())
    ]
    return [*rows, *ends]


def _templates(wheel: Path, prefix: str) -> dict[str, str]:
    """Returns the templates in a wheel by name."""
    if not wheel.is_file():
        raise UserError(f"--trl {wheel}: no such file. Fetch it: pip download trl==1.16.0 --no-deps.")
    with zipfile.ZipFile(wheel) as archive:
        paths = [Path(name) for name in archive.namelist() if name.endswith(".jinja")]
        return {
            path.stem: archive.read(str(path)).decode("utf-8")
            for path in sorted(paths)
            if path.stem.startswith(prefix)
        }


def _in_short(reason: str) -> str:
    """Returns the class of a refusal."""
    classes = {
        "once it is history": "rewrites the turn",
        "cannot be sampled": "generation prompt is no beginning of the turn",
        "cannot stop": "no stop token",
        "has tools that": "leaves the tools out",
        "'tool_calls'": "drops the call",
        "'reasoning_content'": "drops the reasoning",
        "leaves out": "loses content",
    }
    if "chat template fail: " in reason:
        return f" (fails: {reason.partition('chat template fail: ')[2][:60]})"
    return f" ({next((short for words, short in classes.items() if words in reason), reason[:60])})"
