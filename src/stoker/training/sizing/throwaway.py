"""Steps of a model that nobody keeps: for finding learning rates and batch sizes before a run begins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stoker.base.device import resolve_device
from stoker.dataset.dataset import Dataset
from stoker.dataset.split import BatchStream
from stoker.models import RecModel
from stoker.optim import Constant, Schedule
from stoker.training.config import TrainConfig
from stoker.training.placing import place_run, tidy
from stoker.training.process import process_settings
from stoker.training.scheduled import HotColdStream, run_feed, run_stream
from stoker.training.sizing.room import batch_options

__all__ = ["Throwaway", "throwaway"]


class Throwaway:
    """A model as a run would begin with it, and its batches, shuffled, epoch after epoch."""

    def __init__(
        self, model: RecModel, stream: BatchStream | HotColdStream, config: TrainConfig, steps: int, schedule: Schedule
    ) -> None:
        self.model, self.config, self.schedule = model, config, schedule
        self.dense = config.make_dense_optimizer(model)
        self._rates = [group["lr"] for group in self.dense.param_groups]
        self._parameters = model.dense_parameters()
        self._feed = iter(run_feed(stream, steps, model, config, metered=False))
        self._done = 0
        if config.compile:
            model.compile_dense()
        model.train()

    def step(self, *, vary_dense: bool = True) -> Tensor:
        """Train on the next batch; its loss.

        Args:
            vary_dense: let the dense rate follow the schedule, as the rows' rate does.
        """
        factor = self.schedule.factor(self._done) if vary_dense else 1.0
        for group, rate in zip(self.dense.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        loss = self.model.loss(next(self._feed))
        loss.backward()  # rows are updated here, in place
        if self.config.dense_clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self.config.dense_clip_norm)
        self.dense.step()
        self.dense.zero_grad()
        self._done += 1
        return loss.detach()

    def score(self, batches: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Return labels and scores of the rows of the next batches, on which it does not train."""
        found: list[tuple[Tensor, Tensor]] = []
        self.model.eval()
        with torch.no_grad():
            for batch in islice(self._feed, batches):
                assert batch.labels is not None
                found.append((batch.labels.cpu().clone(), self.model.predict(batch).cpu()))  # a batch may be reused
        labels, scores = (torch.cat(parts).numpy() for parts in zip(*found, strict=True))
        return labels, scores

    def close(self) -> None:
        """Let go of the batches and what was staged of them."""
        close = getattr(self._feed, "close", None)
        if close is not None:
            close()


@contextmanager
def throwaway(
    data: Dataset,
    config: TrainConfig,
    steps: int,
    schedule: Schedule | None = None,
    row_schedule: Schedule | None = None,
) -> Iterator[Throwaway]:
    """A model to throw away, its rows placed as the settings say; generators and threads are as before afterwards.

    Args:
        data: the dataset.
        config: settings of the run that is to come.
        steps: batches that will be asked for at most.
        schedule: of the dense rate; None: constant.
        row_schedule: of the rows' rate; None: the same.

    Raises:
        ConfigError: a budget that cannot work.
    """
    config = config.replace(batch_order="shuffled")
    schedule = schedule or Constant()
    with process_settings(config), tidy(config) as models:
        optimizer = config.make_row_optimizer(row_schedule or schedule)
        placement = place_run(config, data, optimizer)
        # As the run will read them: where rows are held decides how long a step takes.
        options = batch_options(
            config, config.stored_tables(data.schema), optimizer.state, resolve_device(config.device),
            placed=placement is not None and not placement.resident,
        )  # fmt: skip
        stream = run_stream(config, data, **options)
        model = config.make_model(data.schema, optimizer, placement)
        models.append(model)
        made = Throwaway(model, stream, config, steps, schedule)
        try:
            yield made
        finally:
            made.close()
        model.embeddings.close()
