"""What exchanges are called: the kinds of the requests of :mod:`fedlearn.core.messages`.

And what the trainings of a coordinator are called.
"""

TRAIN_KIND = "TrainRequest"
EVALUATE_KIND = "EvaluateRequest"

#: Exchanges of a session of secure aggregation: all stages alike, so that the number of an exchange
#: says which comes later.
SECURE_KIND = "SecureRequest"

#: The kinds of training that a run's coordinator does, as its log and its gauges name them.
STEPS, DISTILLATION = "steps", "distillation"
