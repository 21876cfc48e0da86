"""Checks that a draft leaves a target's output as it is, and a record of what was checked."""

from selfspec.inference.certify.certificate import QUICK, CertifySettings, certify, verdicts

__all__ = ["QUICK", "CertifySettings", "certify", "verdicts"]
