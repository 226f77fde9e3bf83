"""Logistic regression by scikit-learn on one-hot features: the baseline that a trained model is measured against.

Reads the same Parquet columns as the model: id columns become one-hot, list columns multi-hot, dense columns stay
numbers. The inverse regularisation C is chosen on the validation split, so that the baseline is as strong as it can be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from shoal.kernels.errors import ConfigError
from shoal.kernels.metrics import BinaryMetrics

#: Candidates for C.
C_GRID = (0.1, 0.3, 1.0, 3.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaselineResult:
    """Metrics of the logistic regression on the test split, and the C that validation chose."""

    auc: float
    log_loss: float
    valid_auc: float
    regularisation_c: float


def one_hot(table: pa.Table, cardinalities: Mapping[str, int], dense: Sequence[str]) -> Any:
    """A scipy CSR matrix [rows, sum(cardinalities) + len(dense)]; ids lie in [0, cardinality)."""
    import scipy.sparse as sparse

    num_rows = table.num_rows
    blocks = []
    for name, width in cardinalities.items():
        column = table.column(name).combine_chunks()
        if pa.types.is_list(column.type):
            ids = column.flatten().to_numpy()
            offsets = np.concatenate(([0], np.cumsum(pc.list_value_length(column).to_numpy())))
        else:
            ids, offsets = column.to_numpy(), np.arange(num_rows + 1)
        blocks.append(sparse.csr_matrix((np.ones(len(ids)), ids, offsets), shape=(num_rows, width)))
    if dense:
        blocks.append(sparse.csr_matrix(np.stack([table.column(name).to_numpy() for name in dense], axis=1)))
    return sparse.hstack(blocks, format="csr")


def logistic_regression(
    folders: Mapping[str, str | Path],
    cardinalities: Mapping[str, int],
    *,
    dense: Sequence[str] = (),
    label: str = "label",
    c_grid: Sequence[float] = C_GRID,
) -> BaselineResult:
    """Fit on ``folders["train"]``, choose C by AUC on ``folders["valid"]``, report on ``folders["test"]``.

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    try:
        from sklearn.linear_model import LogisticRegression
    except ImportError as error:
        raise ConfigError("the baseline needs scikit-learn: pip install 'shoal[quickstart]' or scikit-learn") from error

    columns = [label, *dense, *cardinalities]
    tables = {split: pq.read_table(folder, columns=columns) for split, folder in folders.items()}
    x = {split: one_hot(table, cardinalities, dense) for split, table in tables.items()}
    y = {split: table.column(label).to_numpy() for split, table in tables.items()}
    best: tuple[float, float, Any] | None = None
    for c in c_grid:
        model = LogisticRegression(C=c, max_iter=300, tol=1e-4)
        model.fit(x["train"], y["train"])
        auc = _measure(model, x["valid"], y["valid"])["auc"]
        if best is None or auc > best[0]:
            best = (auc, c, model)
    assert best is not None, "c_grid is empty"
    test = _measure(best[2], x["test"], y["test"])
    return BaselineResult(auc=test["auc"], log_loss=test["log_loss"], valid_auc=best[0], regularisation_c=best[1])


def _measure(model: Any, x: Any, y: np.ndarray) -> dict[str, float]:
    metrics = BinaryMetrics()
    metrics.update(model.predict_proba(x)[:, 1], y)
    return metrics.compute()
