select s.place, s.charge, s.key, s.limit_name, s.is_shadow, s.is_new, s.now_us, charged.allowed,
       charged.next_us as next_a, charged.next_rest as next_b, 0::bigint as next_c, s.n1 as next_d, s.n2 as next_e, s.n3 as next_f,
       null::bigint[] as next_extra, 1::bigint as next_tail_us, null::bigint[] as next_log_us, null::bigint[] as next_log_sums,
       array[charged.missing_us, charged.missing_rest] as reading
from seen as s, lateral (
       select c.*
       from {prefix}{strategy}_charge(
         s.a, s.b, s.n1, s.n2, s.n3, null, s.n1, s.n2, s.n3, 0, s.price_us, s.price_rest, s.now_us) as c offset 0) as charged
where s.is_simple and s.strategy = {number}
