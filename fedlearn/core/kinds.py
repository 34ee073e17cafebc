"""Kinds of the requests in :mod:`fedlearn.core.messages`, and of a coordinator's training."""

TRAIN_KIND = "TrainRequest"
EVALUATE_KIND = "EvaluateRequest"

#: All stages of a secure-aggregation session share one kind, so that the number of an exchange
#: tells which of two stages comes later.
SECURE_KIND = "SecureRequest"

#: The kinds of training that a run's coordinator does itself, as its log and gauges name them.
STEPS, DISTILLATION = "steps", "distillation"
