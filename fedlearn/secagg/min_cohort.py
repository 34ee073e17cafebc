"""The cohort size below which clients and coordinators warn that a sum hides too little."""

#: Accomplices of the coordinator can subtract their own updates from a sum, and at least one is
#: always assumed (A >= 1). In a cohort of four that leaves three honest clients, each hidden behind
#: two others; even with two accomplices each is hidden behind one. In a cohort of three, two
#: accomplices would expose the third client's update.
USUAL_MIN_COHORT = 4
