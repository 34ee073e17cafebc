"""How few clients a sum may be of: the number by which clients and coordinators are warned."""

#: Accomplices of the coordinator take their own part off a sum. In a cohort of up to ten one is
#: always assumed (A): beside it there are three honest clients, each hidden behind two others, and
#: with two accomplices still behind one. Of three, two accomplices leave the update itself.
USUAL_MIN_COHORT = 4
