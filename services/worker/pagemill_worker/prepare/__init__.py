"""Turns MODEL into a prepared folder of ordinary files (see `pagemill_shared.manifest`)."""

from pagemill_worker.prepare.preparation import prepare_model
from pagemill_worker.prepare.workspace import Report

__all__ = ["Report", "prepare_model"]
