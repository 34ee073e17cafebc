"""Federated statistics: counts, means, distributions and frequent values over clients' tables."""

from fedlearn.statistics.plan import StatisticsPlan as StatisticsPlan
from fedlearn.statistics.query import StatisticsQuery as StatisticsQuery
from fedlearn.statistics.schema import CategoryColumn as CategoryColumn
from fedlearn.statistics.schema import ClientTable as ClientTable
from fedlearn.statistics.schema import NumberColumn as NumberColumn
from fedlearn.statistics.schema import TextColumn as TextColumn
from fedlearn.statistics.statistic import ResultRow as ResultRow
