"""Norms of single heads (Qwen3's), where ranks split the heads."""

from utils.collectives import copy_to_region


class HeadNorm:
    """A norm of each head by itself (Qwen3's), whose weight, (D,), all ranks have.

    A rank's norm has seen only the rank's own heads. So f is applied to the weight, where the
    norm's forward reads it: the weight's gradient is summed over `get_group()`, the ranks that
    split heads.
    """

    is_running = False

    def forward(self, x):
        self.is_running = True
        try:
            return super().forward(x)
        finally:
            self.is_running = False

    @property
    def weight(self):
        weight = self._parameters["weight"]
        return copy_to_region(weight, self.get_group()) if self.is_running else weight
