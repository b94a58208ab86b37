"""The models that a front serves: which of them a request means, and what concerns all of them at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from headrace.base.errors import NotFoundError, RequestError
from headrace.gateway.pipeline import Pipeline
from headrace.protocol.launch import Kind

# Names that an error lists; a deployment has a handful.
_MAX_LISTED: Final = 20
_GIVES: Final = {
    Kind.GENERATE: "generates text",
    Kind.EMBED: "makes vectors",
    Kind.SCORE: "scores",
    Kind.CLASSIFY: "classifies",
}


class Models:
    """The pipelines of a front, one for each model.

    Args:
        pipelines: at least one; no name belongs to two.
    """

    def __init__(self, pipelines: Sequence[Pipeline]) -> None:
        assert pipelines, "a front serves something"
        self._pipelines = tuple(pipelines)
        self._by_name = {name: pipeline for pipeline in pipelines for name in pipeline.served_names}
        assert len(self._by_name) == sum(len(pipeline.served_names) for pipeline in pipelines), "names are unique"

    def __iter__(self) -> Iterator[Pipeline]:
        return iter(self._pipelines)

    def __len__(self) -> int:
        return len(self._pipelines)

    @property
    def names(self) -> tuple[str, ...]:
        """The canonical names, in the configuration's order."""
        return tuple(pipeline.name for pipeline in self._pipelines)

    def named(self, name: str) -> Pipeline:
        """Gives the model that has this name.

        Raises:
            NotFoundError: ``model_not_found``; lists those that there are.
        """
        pipeline = self._by_name.get(name)
        if pipeline is None:
            raise NotFoundError(
                f"the model {ascii(name)[:100]} does not exist here: there is {self._listed()}",
                param="model",
                code="model_not_found",
            )
        return pipeline

    def find(self, name: str | None, *kinds: Kind) -> Pipeline:
        """Gives the model that a request means: the named one, or the only one of the first kind that there is.

        Whether a named one is of a right kind is for its endpoint to say.

        Args:
            kinds: what the endpoint can use, the best first; none takes any.
        Raises:
            NotFoundError: no model has this name.
            RequestError: no name is given, and several models could be meant, or none.
        """
        if name:
            return self.named(name)
        if len(self._pipelines) == 1:
            return self._pipelines[0]
        for kind in kinds:
            found = [pipeline for pipeline in self._pipelines if pipeline.kind is kind]
            if len(found) == 1:
                return found[0]
            if found:
                break
        else:
            if kinds:
                raise RequestError(
                    f"no model here {_GIVES[kinds[0]]}: there is {self._listed()}",
                    param="model",
                    code="model_not_supported",
                )
        raise RequestError(
            f"model is required where several could be meant: there is {self._listed()}",
            param="model",
            code="missing_required",
        )

    @property
    def is_draining(self) -> bool:
        """Whether nothing new is taken."""
        return any(pipeline.is_draining for pipeline in self._pipelines)

    @property
    def num_open(self) -> int:
        """Requests inside this front."""
        return sum(pipeline.num_open for pipeline in self._pipelines)

    def drain(self) -> None:
        """Refuses what is new, and what waits for a place; what runs goes on."""
        for pipeline in self._pipelines:
            pipeline.drain()

    def end_all(self, *, is_stream: bool) -> int:
        """Ends the streaming or the other requests, because the drain's time is over. Returns how many."""
        return sum(pipeline.end_all(is_stream=is_stream) for pipeline in self._pipelines)

    def _listed(self) -> str:
        shown = [f"{pipeline.name} ({_GIVES[pipeline.kind]})" for pipeline in self._pipelines[:_MAX_LISTED]]
        more = len(self._pipelines) - len(shown)
        return ", ".join([*shown, *([f"and {more} more"] if more > 0 else [])])
