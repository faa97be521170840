"""What is in the store's file: its tables, and the records that are read from them. No SQL is run here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from tools.admission import Hindrance
from tools.records import BLayout, Budget, Mode, Record

SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 30.0

SessionStatus = Literal["running", "finished", "stopped", "failed"]

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE results (
  key TEXT PRIMARY KEY, kind TEXT NOT NULL, scope TEXT NOT NULL, variant_key TEXT, task_id TEXT,
  status TEXT NOT NULL, setting TEXT NOT NULL, payload TEXT NOT NULL, created_at TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX results_by_task ON results (task_id, kind, scope);
CREATE INDEX results_by_variant ON results (variant_key, kind, scope);
CREATE TABLE variants (
  key TEXT PRIMARY KEY, variant_id TEXT NOT NULL, plan TEXT, source BLOB NOT NULL, rest TEXT NOT NULL,
  label TEXT NOT NULL, created_at TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE sessions (
  session_id TEXT PRIMARY KEY, config TEXT NOT NULL, status TEXT NOT NULL, created_at TEXT NOT NULL,
  updated_at TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE trajectories (
  trajectory_id TEXT PRIMARY KEY, session_id TEXT NOT NULL, task_id TEXT NOT NULL, payload BLOB NOT NULL,
  created_at TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX trajectories_by_session ON trajectories (session_id, created_at);
"""

# A sanitize of a family's plan has no task_id and counts for every shape, that of a raw source only for its own.
TIMED = """
SELECT r.variant_key, r.scope, r.payload,
  (SELECT group_concat(v.setting || ':' || v.status) FROM results v
    WHERE v.variant_key = r.variant_key AND v.kind = 'verify' AND v.scope = r.scope AND v.task_id = r.task_id),
  (SELECT group_concat(':' || s.status) FROM results s
    WHERE s.variant_key = r.variant_key AND s.kind = 'sanitize' AND s.scope = r.scope
    AND (s.task_id IS NULL OR s.task_id = r.task_id)),
  (SELECT group_concat(t.setting || ':' || t.status) FROM results t
    WHERE t.variant_key = r.variant_key AND t.kind = 'time' AND t.scope = r.scope AND t.task_id = r.task_id)
FROM results r
WHERE r.task_id = :task_id AND r.kind = 'time' AND r.status = 'ok' AND r.setting LIKE :mode || '/%'
  AND (:scope IS NULL OR r.scope = :scope)
"""

BUDGET_RANK: Mapping[str, int] = {"screen": 0, "final": 1, "certify": 2}


class StoreError(RuntimeError):
    """The store's file cannot be used; one sentence for the user."""


class Session(Record):
    session_id: str
    config: dict[str, Any]
    status: SessionStatus
    created_at: str  # UTC, ISO 8601
    updated_at: str


class Standing(Record):
    """One variant timed at a task: its timing at the longest budget, and what keeps it off the leaderboard, if
    anything."""

    variant_key: str
    device: str
    driver: str
    b_layout: BLayout
    mode: Mode
    budget: Budget
    reference: str
    ratio: float
    ratio_lo: float
    ratio_hi: float
    time_us: float
    ref_us: float
    hindrance: Hindrance | None = None

    @property
    def admitted(self) -> bool:
        return self.hindrance is None


#: Of a timing's row, what a standing takes.
ROW_FIELDS = (
    "device",
    "driver",
    "b_layout",
    "mode",
    "budget",
    "reference",
    "ratio",
    "ratio_lo",
    "ratio_hi",
    "time_us",
    "ref_us",
)
