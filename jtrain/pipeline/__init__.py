"""Pipeline schedules as data: what each worker computes, sends and keeps, known before anything runs."""
