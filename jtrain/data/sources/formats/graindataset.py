"""Records of a `grain.MapDataset` of strings that a function of the user returns."""

from jtrain.data.sources.formats.record import SKIP, BadRecord, Records
from jtrain.data.sources.retry import transient_cause
from jtrain.errors import UserError
from jtrain.runtime.user_code import load_function


class GrainDataset(Records):
    """Grain dataset in which element n is record n; filtered elements are empty documents.

    Raises:
      UserError: there is no such function, or it returns another type or a dataset without an end.
    """

    def __init__(self, path: str, *, field: str) -> None:
        import grain  # lazy: takes 0.9 s, and only this format needs it

        setting = f"{field}.path={path!r}"
        make_dataset, _ = load_function(f"{field}.path", path)
        self._path = path
        self._dataset = make_dataset()
        if not isinstance(self._dataset, grain.MapDataset):
            raise UserError(
                f"{setting}: returned a {type(self._dataset).__name__}, not a grain.MapDataset; records are "
                "read by number. Return the dataset before `to_iter_dataset`."
            )
        # `repeat()` without a number gives sys.maxsize elements.
        if len(self._dataset) >= 1 << 62:
            raise UserError(
                f"{setting}: the dataset has no end. Leave out `repeat()`; the run repeats it by itself."
            )

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, records: list[int]) -> list[str | BadRecord]:
        return [self._element(record) for record in records]

    def _element(self, record: int) -> str | BadRecord:
        try:
            element = self._dataset[record]
        except Exception as error:  # a transform of the user's may raise anything
            if transient_cause(error):
                raise
            reason = f"{type(error).__name__}: {error}"
        else:
            if element is None:
                return ""
            if isinstance(element, str):
                return element
            reason = f"it is {type(element).__name__}, not text"
        return BadRecord(f"{self._path}, element {record}: {reason}. Mend the dataset, {SKIP}")
