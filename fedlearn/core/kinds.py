"""What exchanges are called: the kinds of the requests of :mod:`fedlearn.core.messages`."""

TRAIN_KIND = "TrainRequest"
EVALUATE_KIND = "EvaluateRequest"

#: Exchanges of a session of secure aggregation: all stages alike, so that the number of an exchange
#: says which comes later.
SECURE_KIND = "SecureRequest"
